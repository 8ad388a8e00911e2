"""What must survive a crash: the ledger of groups, the outbox of unsent work, counters. SQLite in WAL mode.

Every method is one transaction, durable when it returns. One thread at a time uses a store (the node calls
it through
a one-thread limiter), so that a slow disk never stops a heartbeat.
"""

import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    id BLOB PRIMARY KEY,
    sender BLOB NOT NULL,
    policy BLOB NOT NULL,
    counter INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL,
    source TEXT NOT NULL CHECK (source IN ('local', 'external')),
    state TEXT NOT NULL CHECK (state IN ('accepted', 'consumed', 'stale', 'refused')),
    reason TEXT NOT NULL DEFAULT '',
    consumed_version INTEGER,
    tokens INTEGER NOT NULL DEFAULT 0,
    mean_reward REAL NOT NULL DEFAULT 0,
    arrival INTEGER NOT NULL,
    envelope BLOB,
    checked BLOB
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, arrival);
CREATE UNIQUE INDEX IF NOT EXISTS groups_by_counter ON groups (sender, policy, counter);
CREATE TABLE IF NOT EXISTS outbox (id BLOB PRIMARY KEY, counter INTEGER NOT NULL, envelope BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS refusals (reason TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""

KEEP_BODIES = 4096
"""Finished groups whose signed bodies are kept, for peers that pull them and for later checks."""


@dataclass(frozen=True)
class Verdict:
    """What was decided about a group."""

    accepted: bool
    reason: str


@dataclass(frozen=True)
class WaitingGroup:
    """An accepted group that has not been consumed."""

    id: bytes
    sender: bytes
    source: str
    oldest_version: int
    envelope: bytes
    checked: dict[str, Any]


class StoreError(Exception):
    """The store cannot be opened; the message says what to do."""


class Store:
    """The durable state of one node."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{path}: cannot open the ledger ({error}); move the file away to start an empty one"
            ) from error

    def close(self) -> None:
        self._db.close()

    # Counters

    def reserve(self, name: str, count: int, start: int = 0) -> int:
        """Reserve `count` numbers that no one got before, across restarts; returns the first.

        A ledger that has none reserved yet begins at `start`.
        """
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
            first = int(row[0]) if row else start
            self._db.execute(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, first + count),
            )
        return first

    # Ledger of received groups

    def verdict(self, group: bytes) -> Verdict | None:
        """What was decided about a group before, if anything."""
        row = self._db.execute("SELECT state, reason FROM groups WHERE id = ?", (group,)).fetchone()
        if row is None:
            return None
        return Verdict(accepted=row[0] != "refused", reason=str(row[1]))

    def accept(
        self,
        group: bytes,
        *,
        sender: bytes,
        policy: bytes,
        counter: int,
        oldest_version: int,
        source: str,
        tokens: int,
        mean_reward: float,
        envelope: bytes,
        checked: dict[str, Any],
    ) -> bool:
        """Record an accepted group; False if it, or another of its sender's with its counter, is here
        already."""
        with self._db:
            done = self._db.execute(
                "INSERT OR IGNORE INTO groups "
                "(id, sender, policy, counter, oldest_version, source, state, tokens, "
                "mean_reward, arrival, envelope, checked) VALUES (?, ?, ?, ?, ?, ?, 'accepted', ?, ?, "
                "(SELECT COALESCE(MAX(arrival), 0) + 1 FROM groups), ?, ?)",
                (
                    group,
                    sender,
                    policy,
                    counter,
                    oldest_version,
                    source,
                    tokens,
                    mean_reward,
                    envelope,
                    msgpack.packb(checked),
                ),
            )
        return done.rowcount == 1

    def waiting(self) -> list[WaitingGroup]:
        """Accepted groups not yet consumed, oldest arrival first."""
        rows = self._db.execute(
            "SELECT id, sender, source, oldest_version, envelope, checked FROM groups "
            "WHERE state = 'accepted' ORDER BY arrival"
        ).fetchall()
        return [
            WaitingGroup(group, sender, source, oldest, envelope, msgpack.unpackb(checked))
            for group, sender, source, oldest, envelope, checked in rows
        ]

    def record_update(self, version: int, consumed: Iterable[bytes], stale: Iterable[bytes]) -> list[bytes]:
        """The update that made `version` consumed and dropped these groups. Returns ids that were not
        waiting.

        Anything returned is a broken promise (unknown, or consumed before) and must be reported.
        """
        unexpected: list[bytes] = []
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for group in consumed:
                done = self._db.execute(
                    "UPDATE groups SET state = 'consumed', consumed_version = ? WHERE id = ? AND "
                    "(state = 'accepted' OR (state = 'consumed' AND consumed_version = ?))",
                    (version, group, version),
                )
                if done.rowcount != 1:
                    unexpected.append(group)
            self._db.executemany(
                "UPDATE groups SET state = 'stale', consumed_version = ? WHERE id = ? AND state = 'accepted'",
                [(version, group) for group in stale],
            )
            self._db.execute(
                "UPDATE groups SET envelope = NULL, checked = NULL WHERE envelope IS NOT NULL AND "
                "state IN ('consumed', 'stale') AND arrival < (SELECT MAX(arrival) FROM groups) - ?",
                (KEEP_BODIES,),
            )
        return unexpected

    def reconcile(self, version: int, consumed_by_version: dict[int, list[bytes]]) -> tuple[int, int]:
        """Follow the learner's checkpoint after a crash: it alone knows which groups are in the weights.

        Groups marked consumed by versions that the checkpoint does not have wait again; groups that it
        consumed and
        the ledger still shows as waiting are marked. Returns (given back, marked).
        """
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            back = self._db.execute(
                "UPDATE groups SET state = 'accepted', consumed_version = NULL "
                "WHERE state IN ('consumed', 'stale') AND consumed_version > ?",
                (version,),
            ).rowcount
            marked = 0
            for consumed_version, groups in consumed_by_version.items():
                for group in groups:
                    marked += self._db.execute(
                        "UPDATE groups SET state = 'consumed', consumed_version = ? "
                        "WHERE id = ? AND state = 'accepted'",
                        (consumed_version, group),
                    ).rowcount
        return back, marked

    def counts(self) -> dict[str, int]:
        """Groups by state."""
        rows = self._db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall()
        return {str(state): int(count) for state, count in rows}

    def accepted_by_sender(self) -> dict[bytes, int]:
        """Accepted groups (waiting, consumed or stale) of each sender."""
        rows = self._db.execute(
            "SELECT sender, COUNT(*) FROM groups WHERE state != 'refused' GROUP BY sender"
        ).fetchall()
        return {bytes(sender): int(count) for sender, count in rows}

    def consumed_external_by_sender(self) -> dict[bytes, int]:
        """External groups trained on, by sender."""
        rows = self._db.execute(
            "SELECT sender, COUNT(*) FROM groups "
            "WHERE state = 'consumed' AND source = 'external' GROUP BY sender"
        ).fetchall()
        return {bytes(sender): int(count) for sender, count in rows}

    def envelopes(self, groups: list[bytes]) -> list[bytes]:
        """The signed bodies of groups that are still kept, in the order asked."""
        found: list[bytes] = []
        for group in groups:
            row = self._db.execute("SELECT envelope FROM groups WHERE id = ?", (group,)).fetchone()
            if row is not None and row[0] is not None:
                found.append(bytes(row[0]))
        return found

    # Outbox of a worker

    def put_outbox(self, group: bytes, counter: int, envelope: bytes) -> None:
        """Keep a generated group until its receipt comes."""
        with self._db:
            self._db.execute("INSERT OR IGNORE INTO outbox VALUES (?, ?, ?)", (group, counter, envelope))

    def outbox(self) -> list[tuple[bytes, bytes]]:
        """(group id, envelope) of everything unsent, oldest first."""
        rows = self._db.execute("SELECT id, envelope FROM outbox ORDER BY counter").fetchall()
        return [(bytes(group), bytes(envelope)) for group, envelope in rows]

    def settle_outbox(self, group: bytes, verdict: str) -> None:
        """The receipt came: forget the group, count the verdict ("accepted" or a refusal's reason)."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM outbox WHERE id = ?", (group,))
            self._add(f"receipt:{verdict}", 1)
            if verdict == "accepted":
                self._db.execute(
                    "INSERT INTO counters VALUES ('last_accepted_unix', ?) ON CONFLICT (name) DO UPDATE "
                    "SET value = excluded.value",
                    (int(time.time()),),
                )

    def receipts(self) -> dict[str, int]:
        """Receipts by verdict."""
        rows = self._db.execute("SELECT name, value FROM counters WHERE name LIKE 'receipt:%'").fetchall()
        return {str(name).removeprefix("receipt:"): int(value) for name, value in rows}

    def counter(self, name: str) -> int | None:
        """A counter's value, for display."""
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return None if row is None else int(row[0])

    # Refusals

    def add_refusals(self, counts: dict[str, int]) -> None:
        """Add to the count of each reason."""
        with self._db:
            self._db.executemany(
                "INSERT INTO refusals VALUES (?, ?) "
                "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
                list(counts.items()),
            )

    def refusals(self) -> dict[str, int]:
        rows = self._db.execute("SELECT reason, count FROM refusals").fetchall()
        return {str(reason): int(count) for reason, count in rows}

    def _add(self, name: str, amount: int) -> None:
        self._db.execute(
            "INSERT INTO counters VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (name, amount),
        )
