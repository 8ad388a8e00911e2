"""What must survive a crash: the ledger of groups, the outbox of unsent work, counters. SQLite in WAL mode.

Every method is one transaction, durable when it returns. Any thread may call one; a lock makes them take
turns, for they share a connection, and a transaction of one must not end inside that of another.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
CREATE INDEX IF NOT EXISTS groups_by_arrival ON groups (arrival);
CREATE INDEX IF NOT EXISTS groups_with_body ON groups (arrival) WHERE envelope IS NOT NULL;
CREATE TABLE IF NOT EXISTS tally (
    sender BLOB NOT NULL, source TEXT NOT NULL, state TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (sender, source, state)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS tally_new AFTER INSERT ON groups BEGIN
    INSERT INTO tally VALUES (new.sender, new.source, new.state, 1)
    ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER IF NOT EXISTS tally_moved AFTER UPDATE OF state ON groups WHEN old.state != new.state BEGIN
    UPDATE tally SET count = count - 1
    WHERE sender = old.sender AND source = old.source AND state = old.state;
    INSERT INTO tally VALUES (new.sender, new.source, new.state, 1)
    ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TABLE IF NOT EXISTS published (version INTEGER PRIMARY KEY);
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
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            if self._db.execute("SELECT 1 FROM tally LIMIT 1").fetchone() is None:
                # A ledger from before there was a tally.
                self._db.execute(
                    "INSERT INTO tally SELECT sender, source, state, COUNT(*) FROM groups GROUP BY 1, 2, 3"
                )
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{path}: cannot open the ledger ({error}); move the file away to start an empty one"
            ) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing of what the block writes."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # A full disk makes SQLite end some transactions by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _read(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, parameters).fetchall()

    # Counters

    def reserve(self, name: str, count: int, start: int = 0) -> int:
        """Reserve `count` numbers that no one got before, across restarts; returns the first.

        A ledger that has none reserved yet begins at `start`.
        """
        with self._transaction() as db:
            row = db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
            first = int(row[0]) if row else start
            db.execute(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, first + count),
            )
        return first

    # Ledger of received groups

    def verdict(self, group: bytes) -> Verdict | None:
        """What was decided about a group before, if anything."""
        rows = self._read("SELECT state, reason FROM groups WHERE id = ?", (group,))
        return Verdict(accepted=rows[0][0] != "refused", reason=str(rows[0][1])) if rows else None

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
        with self._transaction() as db:
            done = db.execute(
                "INSERT INTO groups "
                "(id, sender, policy, counter, oldest_version, source, state, tokens, "
                "mean_reward, arrival, envelope, checked) VALUES (?, ?, ?, ?, ?, ?, 'accepted', ?, ?, "
                "(SELECT COALESCE(MAX(arrival), 0) + 1 FROM groups), ?, ?) ON CONFLICT DO NOTHING",
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
        rows = self._read(
            "SELECT id, sender, source, oldest_version, envelope, checked FROM groups "
            "WHERE state = 'accepted' ORDER BY arrival"
        )
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
        with self._transaction() as db:
            for group in consumed:
                done = db.execute(
                    "UPDATE groups SET state = 'consumed', consumed_version = ? WHERE id = ? AND "
                    "(state = 'accepted' OR (state = 'consumed' AND consumed_version = ?))",
                    (version, group, version),
                )
                if done.rowcount != 1:
                    unexpected.append(group)
            db.executemany(
                "UPDATE groups SET state = 'stale', consumed_version = ? WHERE id = ? AND state = 'accepted'",
                [(version, group) for group in stale],
            )
            db.execute(
                # The plus keeps SQLite from the index by state, which has all groups that ever were.
                "UPDATE groups SET envelope = NULL, checked = NULL WHERE envelope IS NOT NULL AND "
                "+state IN ('consumed', 'stale') AND arrival < (SELECT MAX(arrival) FROM groups) - ?",
                (KEEP_BODIES,),
            )
        return unexpected

    def reconcile(self, version: int, consumed_by_version: dict[int, list[bytes]]) -> tuple[int, int]:
        """Follow the learner's checkpoint after a crash: it alone knows which groups are in the weights.

        `consumed_by_version` is what the checkpoint consumed lately; its newest version is the last update
        in these weights (`version` may be higher: old weights under a new number). Groups that the ledger
        has as consumed or dropped by later updates wait again, or are stale if their body is gone; groups
        that the checkpoint consumed and the ledger still shows as waiting are marked. Returns (given back,
        marked).
        """
        last = min(version, max(consumed_by_version, default=0))
        with self._transaction() as db:
            db.execute(
                "UPDATE groups SET state = 'stale' WHERE state = 'consumed' AND consumed_version > ? "
                "AND envelope IS NULL",
                (last,),
            )
            back = db.execute(
                "UPDATE groups SET state = 'accepted', consumed_version = NULL "
                "WHERE state IN ('consumed', 'stale') AND consumed_version > ? AND envelope IS NOT NULL",
                (last,),
            ).rowcount
            marked = 0
            for consumed_version, groups in consumed_by_version.items():
                for group in groups:
                    marked += db.execute(
                        "UPDATE groups SET state = 'consumed', consumed_version = ? "
                        "WHERE id = ? AND state = 'accepted'",
                        (consumed_version, group),
                    ).rowcount
        return back, marked

    def counts(self) -> dict[str, int]:
        """Groups by state."""
        rows = self._read("SELECT state, SUM(count) FROM tally GROUP BY state HAVING SUM(count) > 0")
        return {str(state): int(count) for state, count in rows}

    def accepted_by_sender(self) -> dict[bytes, int]:
        """Accepted groups (waiting, consumed or stale) of each sender."""
        rows = self._read("SELECT sender, SUM(count) FROM tally WHERE state != 'refused' GROUP BY sender")
        return {bytes(sender): int(count) for sender, count in rows}

    def consumed_external_by_sender(self) -> dict[bytes, int]:
        """External groups trained on, by sender."""
        rows = self._read(
            "SELECT sender, count FROM tally WHERE state = 'consumed' AND source = 'external' AND count > 0"
        )
        return {bytes(sender): int(count) for sender, count in rows}

    def staleness(self) -> dict[int, int]:
        """Local groups trained on, by their staleness. Reads the whole ledger: for the start."""
        rows = self._read(
            "SELECT consumed_version - 1 - oldest_version, COUNT(*) FROM groups "
            "WHERE state = 'consumed' AND source = 'local' GROUP BY 1"
        )
        return {int(lag): int(count) for lag, count in rows}

    def updates(self) -> int:
        """Updates whose groups are in the ledger. Reads the whole ledger: for the start."""
        ((count,),) = self._read(
            "SELECT COUNT(DISTINCT consumed_version) FROM groups WHERE state = 'consumed'"
        )
        return int(count)

    def record_published(self, version: int) -> int:
        """A version was published, perhaps not for the first time; returns how many were."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO published VALUES (?)", (version,))
        return self.published_versions()

    def published_versions(self) -> int:
        """How many versions were ever published."""
        ((count,),) = self._read("SELECT COUNT(*) FROM published")
        return int(count)

    def newest_published(self) -> int | None:
        """The highest version that was ever published."""
        ((version,),) = self._read("SELECT MAX(version) FROM published")
        return None if version is None else int(version)

    def envelopes(self, groups: list[bytes], max_bytes: int) -> list[bytes]:
        """The signed bodies of groups that are still kept, in the order asked, up to `max_bytes` of them."""
        found: list[bytes] = []
        for group in groups:
            rows = self._read("SELECT envelope FROM groups WHERE id = ? AND envelope IS NOT NULL", (group,))
            if not rows:
                continue
            max_bytes -= len(rows[0][0])
            if max_bytes < 0:
                break
            found.append(bytes(rows[0][0]))
        return found

    # Outbox of a worker

    def put_outbox(self, group: bytes, counter: int, envelope: bytes) -> None:
        """Keep a generated group until its receipt comes."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO outbox VALUES (?, ?, ?)", (group, counter, envelope))

    def outbox(self) -> list[tuple[bytes, bytes]]:
        """(group id, envelope) of everything unsent, oldest first."""
        rows = self._read("SELECT id, envelope FROM outbox ORDER BY counter")
        return [(bytes(group), bytes(envelope)) for group, envelope in rows]

    def settle_outbox(self, group: bytes, verdict: str) -> None:
        """The receipt came: forget the group, count the verdict ("accepted" or a refusal's reason)."""
        with self._transaction() as db:
            db.execute("DELETE FROM outbox WHERE id = ?", (group,))
            db.execute(
                "INSERT INTO counters VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1",
                (f"receipt:{verdict}",),
            )
            if verdict == "accepted":
                db.execute(
                    "INSERT INTO counters VALUES ('last_accepted_unix', ?) ON CONFLICT (name) DO UPDATE "
                    "SET value = excluded.value",
                    (int(time.time()),),
                )

    def receipts(self) -> dict[str, int]:
        """Receipts by verdict."""
        rows = self._read("SELECT name, value FROM counters WHERE name LIKE 'receipt:%'")
        return {str(name).removeprefix("receipt:"): int(value) for name, value in rows}

    def counter(self, name: str) -> int | None:
        """A counter's value, for display."""
        rows = self._read("SELECT value FROM counters WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else None

    # Refusals

    def add_refusals(self, counts: dict[str, int]) -> None:
        """Add to the count of each reason."""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO refusals VALUES (?, ?) "
                "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
                list(counts.items()),
            )

    def refusals(self) -> dict[str, int]:
        """Refusals by reason."""
        return {str(reason): int(count) for reason, count in self._read("SELECT reason, count FROM refusals")}
