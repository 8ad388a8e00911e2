"""Follows a policy's versions: hears of a new one, fetches what is least, verifies it, hands it over."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from peers.base import PeerId
from peers.chunk_exchange import TransferFailed
from peers.file_assembly import open_assembly, part_path
from peers.swarm import Swarm
from protocol.messages import Delta, Manifest
from protocol.refusals import RefusalReason
from protocol.run_spec import RunSpec
from swarmnode.runtime.download import download_file
from swarmnode.runtime.rebuild import RebuildFailed
from swarmnode.runtime.transfer import Transfer
from swarmnode.runtime.version_store import (
    DELTA_NAME,
    WEIGHTS_NAME,
    StoredVersion,
    VersionStore,
    is_intact,
    version_directory,
)
from swarmnode.runtime.weight_manifests import Holders, ManifestBook
from swarmnode.runtime.weight_plan import NeedManifest, Piece, Way, cheapest_way, is_given_up
from swarmnode.runtime.weight_rebuilds import Rebuilds

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Gossip is lossy: look for a newer version this often even when nothing is heard."""


class WeightFollower:
    """Keeps the newest version of one policy on disk.

    Promises: a version is handed over only when its manifest is signed by the policy's learner and every
    chunk has its hash; versions only move forward; a failed download changes nothing.

    A version that comes as a delta is handed over twice: at once without a snapshot (`weights_path` is None),
    for engines that have its parent in memory, and again when its snapshot is rebuilt and verified. If that
    fails it is withdrawn, with all versions after it that came the same way.
    """

    def __init__(
        self,
        *,
        policy: bytes,
        spec: RunSpec,
        swarm: Swarm,
        versions: VersionStore,
        policies_path: Path,
        holders: Holders,
        providers: Callable[[], Sequence[PeerId]],
        on_version: Callable[[StoredVersion], None],
        on_withdrawn: Callable[[Sequence[int]], None],
        on_event: Callable[[str, str], None],
        on_refusal: Callable[[bytes, RefusalReason, str], None],
    ) -> None:
        """`providers` are connected peers that may have chunks, whole versions or not."""
        self.newest_heard: int | None = None
        self.transfer: Transfer | None = None
        """The file that is being fetched."""
        self._policy = policy
        self._spec = spec
        self._swarm = swarm
        self._versions = versions
        self._policies_path = policies_path
        self._providers = providers
        self._on_version = on_version
        self._on_withdrawn = on_withdrawn
        self._on_event = on_event
        self._on_refusal = on_refusal
        self._manifests = ManifestBook(
            policy=policy, spec=spec, swarm=swarm, holders=holders, on_refusal=on_refusal
        )
        self._rebuilds = Rebuilds(
            policy=policy,
            versions=versions,
            policies_path=policies_path,
            on_rebuilt=self._on_rebuilt,
            on_failed=self._on_rebuild_failed,
            on_event=on_event,
        )
        self._news = trio.Event()
        self._partial: dict[Piece, int] = {}
        """Bytes on disk of files that are not complete."""
        self._looked_at: set[int] = set()
        self._waits_for_rebuild = False
        self._wrong: set[Piece] = set()
        """Deltas that do not give the snapshot which their learner signed."""

    def heard_of(self, version: int) -> None:
        """Somebody says that `version` exists; it is believed only once its manifest is seen."""
        if self.newest_heard is None or version > self.newest_heard:
            self.newest_heard = version
            self._news.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._hand_over_held()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._rebuilds.run)
            while True:
                with trio.move_on_after(POLL_S):
                    await self._news.wait()
                self._news = trio.Event()
                try:
                    await self._catch_up()
                except TransferFailed as error:
                    self._on_event(
                        "warning", f"a version could not be fetched and will be tried again: {error}"
                    )
                except OSError as error:
                    self._on_event("error", f"cannot write weights below {self._policies_path}: {error}")

    async def _hand_over_held(self) -> None:
        """What an earlier start left: the newest snapshot that is intact; deltas go on from it."""
        for version in self._versions.versions(self._policy):
            stored = self._versions.get(self._policy, version)
            assert stored is not None, "listed a moment ago"
            self._manifests.add(stored.manifest, stored.envelope)
        for stored in reversed(self._versions.complete(self._policy)):
            assert stored.weights_path is not None
            if await self._is_intact(stored.weights_path, stored.manifest):
                self._on_version(stored)
                self._rebuilds.wake()
                return
            self._discard_damaged(stored)

    def _discard_damaged(self, stored: StoredVersion) -> None:
        self._on_event("warning", f"version {stored.version} on disk is damaged: fetched anew")
        self._versions.discard_weights(stored)
        self._looked_at.discard(
            stored.version
        )  # What is right of it is counted, and mended if that is least.

    # What to fetch

    async def _catch_up(self) -> None:
        """Fetch until the files of the newest version that anybody knows are here."""
        await self._manifests.ask(None, self.newest_heard)
        without, unknown = set(self._wrong), set[int]()
        failure: TransferFailed | None = None
        while True:
            target = self._manifests.newest
            if target is not None and (self.newest_heard or 0) > target:
                target = await self._manifests.ask(None, self.newest_heard) or target
            if target is None or target <= self._newest_complete:
                return
            way = await self._way(target, without, unknown)
            if way is None:
                if failure is not None:
                    raise failure
                return
            piece = self._first_missing(way)
            if piece is None:
                return  # It is all here, and being rebuilt.
            if piece.kind == "delta" and self._backlog > self._spec.max_staleness:
                # What waits to be rebuilt must not fill the disk.
                self._waits_for_rebuild = True
                return
            try:
                await self._fetch(piece)
            except TransferFailed as error:
                failure = error
                without.add(piece)
                log.info("the %s is not to be had: %s", piece, error)

    @property
    def _newest_complete(self) -> int:
        complete = self._versions.complete(self._policy)
        return complete[-1].version if complete else -1

    @property
    def _backlog(self) -> int:
        """Versions whose snapshot waits to be rebuilt."""
        return sum(version > self._newest_complete for version in self._versions.versions(self._policy))

    async def _way(self, target: int, without: set[Piece], unknown: set[int]) -> Way | None:
        """The cheapest way to `target`, after asking for the manifests that it takes to know."""
        self._looked_at.intersection_update(self._manifests.facts)
        while True:
            for version in [*self._manifests.facts]:
                await self._look_on_disk(version)
            way = cheapest_way(
                target,
                held={stored.version: stored.state for stored in self._versions.complete(self._policy)},
                known=self._manifests.facts,
                done={**self._partial, **self._deltas_held()},
                without=without,
                unknown=unknown,
                longest_chain=self._spec.max_staleness + 2,
            )
            if not isinstance(way, NeedManifest):
                return way
            if await self._manifests.ask(way.version) is None:
                unknown.add(way.version)

    def _deltas_held(self) -> dict[Piece, int]:
        done = {}
        for number in self._versions.versions(self._policy):
            stored = self._versions.get(self._policy, number)
            if stored is not None and stored.delta_path is not None and stored.manifest.delta is not None:
                done[Piece("delta", number)] = stored.manifest.delta.size_bytes
        return done

    def _first_missing(self, way: Way) -> Piece | None:
        held = self._deltas_held()
        return next((piece for piece in way.pieces if piece not in held), None)

    async def _look_on_disk(self, version: int) -> None:
        """Count what an earlier start has fetched of a version."""
        if version in self._looked_at:
            return
        self._looked_at.add(version)
        manifest, _ = self._manifests.get(version)
        stored = self._versions.get(self._policy, version)
        for piece in (Piece("snapshot", version), Piece("delta", version)):
            path = self._path(piece)
            described = _described(manifest, piece)
            registered = stored is not None and path in (stored.weights_path, stored.delta_path)
            there = path.exists() or part_path(path).exists()
            if described is not None and there and not registered:
                async with open_assembly(
                    path, described.size_bytes, described.chunk_size, described.chunks
                ) as assembly:
                    done = sum(assembly.wanted[index][1] for index in assembly.verified)
                if done:
                    self._partial[piece] = done

    def _path(self, piece: Piece) -> Path:
        name = WEIGHTS_NAME if piece.kind == "snapshot" else DELTA_NAME
        return version_directory(self._policies_path, self._policy, piece.version) / name

    # Fetching

    async def _fetch(self, piece: Piece) -> None:
        """Bring one file here and hand it over, unless it is given up because newer versions have made it
        useless meanwhile. Raises `TransferFailed`, `OSError`."""
        manifest, envelope = self._manifests.get(piece.version)
        described = _described(manifest, piece)
        assert described is not None, "only files that exist are planned"
        path = self._path(piece)
        transfer = self.transfer = Transfer(str(piece), described.size_bytes, self._partial.get(piece, 0))
        if piece.kind == "snapshot":
            self._on_event("info", f"fetching the {piece}, {described.size_bytes / 1e6:,.1f} MB")
        failure: Exception | None = None
        done = False
        try:
            with self._versions.keep(self._policy, piece.version):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._reconsider, piece, transfer, nursery.cancel_scope)
                    try:
                        await download_file(
                            self._swarm,
                            self._versions.shelf,
                            path,
                            size_bytes=described.size_bytes,
                            chunk_size=described.chunk_size,
                            chunks=described.chunks,
                            providers=self._providers,
                            progress=transfer.note,
                        )
                        done = True
                    except (TransferFailed, OSError) as error:
                        failure = error
                    nursery.cancel_scope.cancel()
        finally:
            self.transfer = None
            self._partial[piece] = transfer.done_bytes
        if failure is not None:
            # Raised here and not inside: a nursery would wrap it in a group.
            raise failure
        if not done:
            return
        del self._partial[piece]
        if piece.kind == "snapshot":
            await self._hand_over(self._versions.add(manifest, envelope, path))
        else:
            await self._hand_over(self._versions.add(manifest, envelope, None, path))

    async def _reconsider(self, piece: Piece, transfer: Transfer, scope: trio.CancelScope) -> None:
        """End a transfer when newer versions have come meanwhile that make it useless."""
        newest = self.newest_heard or 0
        while True:
            await self._news.wait()
            self._news = trio.Event()
            heard = self.newest_heard or 0
            kept = (self._spec.max_staleness + 1) * self._spec.publish_every
            if heard > newest and heard - piece.version > kept:
                # Its learner has deleted it, and groups of it would be refused as too stale.
                log.info("the %s is given up: version %d exists", piece, heard)
                scope.cancel()
            elif piece.kind == "snapshot":
                await self._manifests.ask(None, self.newest_heard)
                target = self._manifests.newest
                if target is None or target <= piece.version:
                    continue
                self._partial[piece] = transfer.done_bytes
                way = await self._way(target, set(self._wrong), set())
                if is_given_up(piece, transfer.done_bytes, transfer.total_bytes, way):
                    log.info("the %s is given up for a shorter way to version %d", piece, target)
                    scope.cancel()

    async def _hand_over(self, stored: StoredVersion) -> None:
        self._on_version(stored)
        await trio.to_thread.run_sync(self._versions.save_manifest, stored)
        await self._versions.retain(self._policy, self._spec.max_staleness + 2)
        self._rebuilds.wake()

    # Rebuilding

    async def _on_rebuilt(self, stored: StoredVersion) -> None:
        await self._hand_over(stored)
        if self._waits_for_rebuild:
            self._waits_for_rebuild = False
            self._news.set()

    async def _on_rebuild_failed(
        self, parent: StoredVersion, stored: StoredVersion, error: RebuildFailed
    ) -> None:
        """Find out who is to blame: this disk, or the learner, who signed the hashes of all three files."""
        assert parent.weights_path is not None and stored.delta_path is not None
        version, delta = stored.version, stored.manifest.delta
        assert delta is not None
        withdrawn = [one for one in self._versions.versions(self._policy) if one > self._newest_complete]
        if not await self._is_intact(parent.weights_path, parent.manifest):
            self._discard_damaged(parent)
            withdrawn.insert(0, parent.version)
        else:
            delta_is_intact = await self._is_intact(stored.delta_path, delta)
            self._versions.discard_delta(stored)
            stored.delta_path.unlink(missing_ok=True)
            if delta_is_intact:
                self._wrong.add(Piece("delta", version))
                self._on_refusal(
                    self._policy, RefusalReason.WRONG_HASH, f"delta of version {version}: {error}"
                )
                self._on_event(
                    "error",
                    f"the delta of version {version} does not give the weights that its learner signed: "
                    "discarded, the old version stays until the snapshot is here",
                )
            else:
                self._on_event("warning", f"the delta of version {version} on disk is damaged: fetched anew")
        self._on_withdrawn(withdrawn)
        self._news.set()

    async def _is_intact(self, path: Path, described: Manifest | Delta) -> bool:
        return await trio.to_thread.run_sync(
            is_intact, path, described.size_bytes, described.chunk_size, described.chunks
        )


def _described(manifest: Manifest, piece: Piece) -> Manifest | Delta | None:
    """What tells size and chunks of a file."""
    return manifest if piece.kind == "snapshot" else manifest.delta
