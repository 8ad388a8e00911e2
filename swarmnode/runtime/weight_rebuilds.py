"""Snapshots from deltas in the background, one version after the other.

Those wait for this who fetch whole snapshots, and the groups of a version that is in use already. It has the
priority of everything else: a thread of a lower one that is kept from the processor while it holds Python's
lock stops the event loop (by 0.2 to 0.7 s at niceness 10, beside busy processes).
"""

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from swarmnode.runtime.rebuild import RebuildFailed, rebuild_snapshot
from swarmnode.runtime.version_store import WEIGHTS_NAME, StoredVersion, VersionStore, version_directory

THREADS = 2
RETRY_S = 10.0
"""After a disk error."""


class Rebuilds:
    """Completes each version of one policy whose delta is held and whose parent's snapshot is."""

    def __init__(
        self,
        *,
        policy: bytes,
        versions: VersionStore,
        policies_path: Path,
        on_rebuilt: Callable[[StoredVersion], Awaitable[None]],
        on_failed: Callable[[StoredVersion, StoredVersion, RebuildFailed], Awaitable[None]],
        on_event: Callable[[str, str], None],
    ) -> None:
        """`on_failed` gets the parent and the version; the pair must not come again."""
        self._policy = policy
        self._versions = versions
        self._policies_path = policies_path
        self._on_rebuilt = on_rebuilt
        self._on_failed = on_failed
        self._on_event = on_event
        self._news = trio.Event()

    def wake(self) -> None:
        """The store has something new."""
        self._news.set()

    async def run(self) -> None:
        """Rebuild until cancelled."""
        stop = threading.Event()
        try:
            while True:
                pair = self._next()
                if pair is None:
                    await self._news.wait()
                    self._news = trio.Event()
                    continue
                try:
                    await self._rebuild(*pair, stop)
                except OSError as error:
                    self._on_event("error", f"version {pair[1].version} cannot be written: {error}")
                    await trio.sleep(RETRY_S)
        finally:
            stop.set()

    def _next(self) -> tuple[StoredVersion, StoredVersion] | None:
        """The oldest version that can be rebuilt, after its parent."""
        complete = {stored.version: stored for stored in self._versions.complete(self._policy)}
        for number in self._versions.versions(self._policy):
            stored = self._versions.get(self._policy, number)
            if stored is None or stored.weights_path is not None:
                continue
            delta = stored.manifest.delta
            assert delta is not None, "what is held without a snapshot is held for its delta"
            parent = complete.get(delta.parent)
            if parent is not None and parent.state == delta.parent_state:
                return parent, stored
        return None

    async def _rebuild(self, parent: StoredVersion, stored: StoredVersion, stop: threading.Event) -> None:
        assert parent.weights_path is not None and stored.delta_path is not None
        target = version_directory(self._policies_path, self._policy, stored.version) / WEIGHTS_NAME
        with (
            self._versions.keep(self._policy, parent.version),
            self._versions.keep(self._policy, stored.version),
        ):
            work = partial(
                rebuild_snapshot,
                parent.weights_path,
                stored.delta_path,
                target,
                stored.manifest,
                THREADS,
                stop=stop,
            )
            try:
                # On cancellation `stop` ends it soon.
                await trio.to_thread.run_sync(work, abandon_on_cancel=True)  # type: ignore[call-arg]
            except RebuildFailed as error:
                await self._on_failed(parent, stored, error)
                return
        await self._on_rebuilt(
            self._versions.add(stored.manifest, stored.envelope, target, stored.delta_path)
        )
