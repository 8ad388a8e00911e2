"""One node: opens its data directory, joins its run, starts what its role needs, and takes it all down in
order.

Services are supervised one by one: a crash of any restarts that one and is shown; none takes the others
with it.
"""

import logging
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from peers.base import PeerId
from peers.chunk_serving import ChunkServer
from peers.discovery import Discovery
from peers.libp2p_transport import Libp2pTransport
from peers.supervisor import Crash, supervise
from peers.swarm import Swarm
from protocol.base import Message
from protocol.identity import Identity, NodeKey, node_name
from protocol.invite import Invite
from protocol.limits import MAX_ADDRESSES
from protocol.messages import Hello, PolicyProgress, Presence, Role
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from swarmnode import __version__
from swarmnode.api import ApiServer
from swarmnode.config import NodeConfig, with_overrides
from swarmnode.data_directory import DataDirectory, atomic_write
from swarmnode.runtime.api_address import remove_address, write_address
from swarmnode.runtime.events import Journal
from swarmnode.runtime.joining import fetch_model, fetch_spec, make_invite, serve_spec
from swarmnode.runtime.memory import resident_mb
from swarmnode.runtime.roles import Roles, build_roles
from swarmnode.runtime.run_setup import find_model, load_spec, resolve_role
from swarmnode.runtime.sequence_numbers import SequenceNumbers
from swarmnode.runtime.state import StateBuilder
from swarmnode.runtime.store_thread import StoreThread
from swarmnode.runtime.transfer import FileProgress
from swarmnode.runtime.version_store import VersionStore
from swarmnode.runtime.weight_manifests import serve_manifests
from swarmnode.store import Store

log = logging.getLogger(__name__)

FLUSH_S = 5.0
STATE_S = 1.0
RESIDENT_S = 3.0
STOP_S = 8.5
"""The whole of an orderly stop; what is not done by then is in the ledger and goes on at the next start."""

NOT_FAULTS = {RefusalReason.BUSY, RefusalReason.NOT_FOUND}
"""Refusals that are nobody's fault and so are not counted."""


class NodeFailed(Exception):
    """The node cannot go on; one line that says what to do."""


class Node:
    """See the module. `run` returns after an orderly stop (SIGINT, SIGTERM)."""

    def __init__(
        self,
        directory: DataDirectory,
        config: NodeConfig,
        *,
        invite: Invite | None = None,
        invite_file: Path | None = None,
        join_timeout_s: float = 60.0,
    ) -> None:
        self.directory = directory
        self.config = config
        self._invite = invite
        self._invite_file = invite_file
        self._join_timeout_s = join_timeout_s
        self._refused: Counter[str] = Counter()
        self._unflushed: Counter[str] = Counter()
        self._roles: Roles | None = None
        self.rss_mb = resident_mb()
        self.stop_requested = trio.Event()

    # Lifecycle

    async def run(self) -> None:
        """Run until asked to stop. Raises `NodeFailed` and the errors named in `swarmnode.cli.errors`."""
        async with trio.open_nursery() as nursery:
            # Before anything is begun that would have to be ended in order.
            listening = trio.Event()
            nursery.start_soon(self._watch_signals, listening)
            await listening.wait()
            await self._run()
            nursery.cancel_scope.cancel()

    async def _run(self) -> None:
        self.directory.create()
        self.directory.lock()
        self._start_logging()
        self.identity: Identity = self.directory.load_or_create_identity()
        log.info("data directory: %s", self.directory.root)
        self._store = Store(self.directory.store_path)
        self.store = StoreThread(self._store)
        numbers = SequenceNumbers(self._store, self.store)
        self.next_sequence = numbers.next
        self._refused.update(self._store.refusals())
        self.journal = Journal(self.directory.metrics_path)
        self.journal.load()
        try:
            async with trio.open_nursery() as nursery:
                self.supervise(nursery, "sequence numbers", numbers.run)
                self.supervise(nursery, "curves on disk", self.journal.write)
                await self._run_network(nursery)
                nursery.cancel_scope.cancel()
        finally:
            self.journal.write_now()
            try:
                self._store.add_refusals(dict(self._unflushed))
            except sqlite3.Error as error:
                log.warning("the last refusals were not counted in the ledger (%s)", error)
            self._store.close()

    async def _run_network(self, nursery: trio.Nursery) -> None:
        spec: RunSpec | None = None
        if self.directory.spec_path.exists() or self._invite is None:
            spec, self.spec_envelope = load_spec(self.directory)
            if self._invite is not None and spec.run_id != self._invite.run_id:
                raise NodeFailed(
                    f"{self.directory.root} belongs to run {spec.run_id.hex()[:12]}, the invite to "
                    f"{self._invite.run_id.hex()[:12]}; choose another directory with --data"
                )
        run_id = spec.run_id if spec is not None else self._invite.run_id  # type: ignore[union-attr]
        network = self.config.network
        if self._invite is not None and self._invite.network_key is not None:
            self.directory.save_network_key(self._invite.network_key)
        self.network_key = self.directory.load_network_key()
        transport = Libp2pTransport(
            self.identity,
            listen=list(network.listen),
            announce=list(network.announce),
            private_network_key=self.network_key,
            max_upload_bytes_per_s=_bytes_per_s(network.max_upload_mbps),
            max_download_bytes_per_s=_bytes_per_s(network.max_download_mbps),
        )
        self.transport = transport
        self.versions = VersionStore(self.directory.policies_path, run_id)
        self.versions.scan()
        self.swarm = Swarm(
            transport,
            self.identity,
            run_id,
            next_sequence=self.next_sequence,
            on_refusal=self.count_refusal,
        )
        seeds = [*network.seeds, *(self._invite.seeds if self._invite else [])]
        self.discovery = Discovery(
            self.swarm,
            seeds=list(dict.fromkeys(seeds)),
            hello=self._hello,
            presence=self._presence,
            path=self.directory.address_book_path,
            presence_every_s=network.presence_s,
        )
        ChunkServer(self.swarm, self.versions.shelf)
        serve_manifests(self.swarm, self.versions)
        for kind in ("run_spec_request", "credit_request", "group_push", "group_request"):
            self.swarm.serve(kind, self._not_yet)
        async with transport.running():
            self.supervise(nursery, "gossip", self.swarm.run)
            self.supervise(nursery, "discovery", self.discovery.run)
            await self._until_stop(nursery, spec)

    async def _not_yet(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        """The answer to what a role answers, until the roles run: a fault of nobody, so try again."""
        if self._roles is None:
            raise Refused(RefusalReason.BUSY, "this node is starting; try again")
        raise Refused(RefusalReason.WRONG_KIND, f"a {self.role} does not answer this")

    async def _until_stop(self, nursery: trio.Nursery, spec: RunSpec | None) -> None:
        """Join, work, and stop in order; a stop asked for while joining ends it at once."""
        async with trio.open_nursery() as joining:

            async def end_joining() -> None:
                await self.stop_requested.wait()
                joining.cancel_scope.cancel()

            joining.start_soon(end_joining)
            self.spec = await self._join(spec)
            await self._start_roles(nursery)
            joining.cancel_scope.cancel()
        if self._roles is None:
            return
        api = await self._start_api()
        try:
            self.supervise(nursery, "counts of refusals", self._flush_refusals)
            self.supervise(nursery, "memory", self._measure_memory)
            self._print_welcome(api)
            await self._roles.failed_or(self.stop_requested)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(STOP_S):
                log.info("stopping: finishing what is in hand")
                await self._roles.stop()
                await self.discovery.leave(timeout_s=1.0)
            if api is not None:
                await trio.to_thread.run_sync(api.stop)
                remove_address(self.directory)
        if self._roles.failure is not None:
            raise NodeFailed(self._roles.failure)
        log.info("stopped")

    async def _join(self, spec: RunSpec | None) -> RunSpec:
        if spec is None:
            spec, self.spec_envelope = await fetch_spec(self.swarm, self.discovery, self._join_timeout_s)
            atomic_write(self.directory.spec_path, self.spec_envelope)
        serve_spec(self.swarm, self.spec_envelope)
        role = resolve_role(self.config.role, spec, self.identity)
        self.config = with_overrides(self.config, {"role": role})
        configured = self.config.model or (self.config.run.model if self.config.run else None)
        model_path = await trio.to_thread.run_sync(find_model, spec, configured, self.directory)
        if model_path is None and role != "relay":
            self.journal.event("info", f"fetching the files of model {spec.model.name!r} from peers")
            await fetch_model(
                spec.model,
                self.swarm,
                self.versions,
                self.discovery.connected,
                self.directory.model_path,
                FileProgress(self.journal.event).note,
            )
            model_path = self.directory.model_path
        if model_path is not None:
            self.versions.add_model(model_path, spec.model)
        self.model_path = model_path
        return spec

    async def _start_roles(self, nursery: trio.Nursery) -> None:
        roles = build_roles(self)
        await roles.start(nursery)
        self._roles = roles

    async def _start_api(self) -> ApiServer | None:
        settings = self.config.api
        if not settings.enabled:
            return None
        builder = StateBuilder(self)
        api = ApiServer(settings.host, settings.port, settings.token, builder.latest)
        await trio.to_thread.run_sync(api.start)
        write_address(self.directory, api, settings.token)
        assert self._roles is not None
        self.supervise(self._roles.nursery, "state", builder.run)
        return api

    def _print_welcome(self, api: ApiServer | None) -> None:
        log.info("node %s (%s) in run %s", self.name, self.role, self.spec.name)
        if api is not None:
            log.info("page: %s", api.page_url.partition("?")[0])
        invite = self.invite_text()
        if invite is None:
            return
        log.info("invite: %s", invite)
        if self._invite_file is not None:
            atomic_write(self._invite_file, (invite + "\n").encode())

    # What the parts ask of the node

    @property
    def name(self) -> str:
        """What others see this node as."""
        return self.config.name or self.identity.name

    @property
    def role(self) -> Role:
        """This node's role; before the run is known, the one that most have."""
        return self.config.role or "worker"

    @property
    def roles(self) -> Roles | None:
        """None until the run is joined."""
        return self._roles

    @property
    def refused(self) -> Counter[str]:
        """What this node refused, by reason, over all its starts."""
        return self._refused

    def count_refusal(self, peer: bytes | None, reason: RefusalReason, detail: str) -> None:
        """Count a refusal and show it."""
        if reason in NOT_FAULTS:
            return
        self._refused[reason.value] += 1
        self._unflushed[reason.value] += 1
        who = "somebody" if peer is None else self.name_of(peer)
        self.journal.event(
            "warning", f"refused from {who}: {reason.value}: {detail}", f"refused {reason.value}"
        )

    def name_of(self, key: bytes) -> str:
        """What a node calls itself, or the name of its key."""
        if key == self.identity.key:
            return self.name
        member = self.discovery.member(NodeKey(key))
        return node_name(key) if member is None else member.hello.name

    def supervise(self, nursery: trio.Nursery, name: str, service: Callable[[], Awaitable[None]]) -> None:
        """Run a service for as long as `nursery`, restarting it when it crashes."""

        def report(crash: Crash) -> None:
            log.error("%s", crash, exc_info=crash.error)
            self.journal.event("error", str(crash))

        nursery.start_soon(partial(supervise, name, service, report))

    def invite_text(self) -> str | None:
        """The invite to this run, seeded by this node and the relays it knows."""
        return make_invite(self.swarm, self.discovery, self.network_key)

    def request_stop(self) -> None:
        """Ask for an orderly stop."""
        self.stop_requested.set()

    # Messages about this node

    def _hello(self) -> Hello:
        return Hello(
            name=self.name,
            role=self.role,
            software=f"swarmnode/{__version__}",
            addresses=self.transport.addresses[:MAX_ADDRESSES],
            policies=self._progress(),
        )

    def _progress(self) -> list[PolicyProgress]:
        return [] if self._roles is None else self._roles.progress()

    def _presence(self) -> Presence:
        figures = {} if self._roles is None else self._roles.figures()
        return Presence(
            **self._hello().model_dump(exclude={"policies"}),
            policies=self._progress(),
            rss_mb=self.rss_mb,
            **figures,
        )

    # Small services

    async def _watch_signals(self, listening: trio.Event) -> None:
        try:
            await self._receive_signals(listening)
        finally:
            # A second Ctrl-C in the last moments, when nothing receives signals any more, changes nothing.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    async def _receive_signals(self, listening: trio.Event) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) as signals:
            listening.set()
            async for number in signals:
                if number == signal.SIGUSR1:
                    if self._roles is not None and self._roles.learner is not None:
                        self._roles.learner.finish_training()
                else:
                    self.request_stop()

    async def _flush_refusals(self) -> None:
        while True:
            await trio.sleep(FLUSH_S)
            if self._unflushed:
                counts = dict(self._unflushed)
                await self.store.run(lambda store, counts=counts: store.add_refusals(counts))  # type: ignore[misc]
                self._unflushed -= Counter(counts)

    async def _measure_memory(self) -> None:
        while True:
            pids = [os.getpid(), *(self._roles.child_pids() if self._roles else [])]
            self.rss_mb = await trio.to_thread.run_sync(partial(resident_mb, pids))
            await trio.sleep(RESIDENT_S)

    def _start_logging(self) -> None:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
        for noisy in ("libp2p", "aiohttp", "multiaddr"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


def _bytes_per_s(mbps: float | None) -> float | None:
    return None if mbps is None else mbps * 1e6 / 8
