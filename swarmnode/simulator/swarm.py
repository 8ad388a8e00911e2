"""A swarm of equal nodes on virtual time: each trains its own policy on its own groups and on those that it
pulls.

The node's own code decides: credit, admission of staleness, the queue, and which announced group is pulled
next.
"""

import random
from collections import Counter

import numpy as np

from peers.base import PeerId
from protocol.messages import RolloutAnnouncement
from protocol.pacing import PacingState, grant_credit
from swarmnode.runtime.sharing import MAX_CANDIDATES, Candidates
from swarmnode.scheduler.broadcast import MBIT
from swarmnode.scheduler.planning import BYTES_PER_TOKEN
from swarmnode.simulator.accounts import Report, TimeLine, as_plain, mean_of
from swarmnode.simulator.clock import EventQueue
from swarmnode.simulator.invariants import InvariantBroken
from swarmnode.simulator.population import Machine, draw_machines, lognormal
from swarmnode.simulator.scenario import Scenario
from trainer.replay_buffer import Added, ReplayBuffer

SAMPLES = 240
POOL_BATCHES = 8
"""As the learner's external pool (`trainer.learner.EXTERNAL_POOL_BATCHES`)."""
PACING_BATCHES = 2
KEPT_GROUPS = 64
"""Own groups that a node keeps to serve."""
REMEMBERED_VERSIONS = 16


class SwarmGroup:
    """A group where it lies: local at its author, external elsewhere. Named as the replay buffer asks."""

    __slots__ = ("author", "consumed", "id", "is_informative", "is_local", "oldest_version")

    def __init__(
        self, name: bytes, version: int, author: "SwarmNode", *, local: bool, informative: bool
    ) -> None:
        self.id = name
        self.oldest_version = version
        self.author = author
        self.is_local = local
        self.is_informative = informative
        self.consumed = False


class SwarmNode:
    """Learner and worker of its own policy."""

    def __init__(self, machine: Machine, scenario: Scenario, rng: random.Random) -> None:
        self.machine = machine
        self.key = machine.number.to_bytes(32, "big")
        self.present = machine.present
        self.life = 0
        self.version = 0
        self.in_hand = 0
        self.training_since_s: float | None = None
        self.pulling = False
        self.neighbours: list[SwarmNode] = []
        self.connected: set[PeerId] = set()
        self.candidates = Candidates(rng)
        run = scenario.run
        self.buffer: ReplayBuffer[SwarmGroup] = ReplayBuffer(
            max_staleness=run.max_staleness,
            local_bound=run.batch_groups * 4 * (run.max_staleness + 1),
            external_bound=run.external_groups * POOL_BATCHES,
        )
        self.held: dict[bytes, SwarmGroup] = {}
        self.updates = 0


class SwarmSimulation:
    """Runs a scenario of kind `swarm`. The same scenario gives the same report, on any machine."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.numpy_rng = np.random.default_rng(scenario.seed)
        self.clock = EventQueue()
        self.nodes = [SwarmNode(machine, scenario, self.rng) for machine in draw_machines(scenario, self.rng)]
        self.by_key = {node.key: node for node in self.nodes}
        self.counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.authors: Counter[int] = Counter()
        self.train_s = self.present_s = 0.0
        self.most_stale = self.consumed_twice = 0
        self.timeline = TimeLine(scenario.duration_s / SAMPLES)
        self._present = sum(node.present for node in self.nodes)
        self._present_since_s = 0.0
        self._groups = 0
        run = scenario.run
        self._group_bytes = run.group_size * run.completion_tokens * BYTES_PER_TOKEN
        self._target = run.external_groups * scenario.swarm.candidates_per_group
        self._checked = 0

    def run(self) -> Report:
        """Simulate from start to end."""
        self._connect()
        for node in self.nodes:
            if node.present:
                self._begin_stay(node)
            else:
                self._schedule_return(node)
        self.clock.after(self.timeline.step_s, self._sample)
        self.clock.run(self.scenario.warmup_s, self._check)
        before = self._snapshot()
        self.staleness.clear()
        self.authors.clear()
        self.clock.run(self.scenario.duration_s, self._check)
        return self._report(before)

    def _connect(self) -> None:
        """A random graph in which every node has about as many connections as it may."""
        degree = min(self.scenario.swarm.neighbours, len(self.nodes) - 1)
        for _ in range((degree + 1) // 2):
            ring = list(self.nodes)
            self.rng.shuffle(ring)
            for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
                if other is not one and other not in one.neighbours:
                    one.neighbours.append(other)
                    other.neighbours.append(one)

    # Generation

    def _ask(self, node: SwarmNode) -> None:
        """Begin as many groups as the node's own learner wants and its engine takes."""
        run, now = self.scenario.run, self.clock.now
        in_training = 0 if node.training_since_s is None else run.batch_groups
        state = PacingState(
            version=node.version,
            published_version=node.version,
            batch_groups=run.batch_groups,
            waiting=node.buffer.local_waiting + in_training,
            outstanding=node.in_hand,
            max_staleness=run.max_staleness,
            pacing_batches=run.pacing_batches or PACING_BATCHES + 1,
        )
        wanted = node.machine.kind.groups_in_hand - node.in_hand
        granted = grant_credit(state, node.version, wanted).count if wanted > 0 else 0
        mean_s = node.machine.kind.groups_in_hand / node.machine.groups_per_s
        for _ in range(granted):
            node.in_hand += 1
            takes_s = lognormal(self.rng, mean_s, run.length_spread)
            self.clock.at(now + takes_s, self._finished, node, node.life, node.version)

    def _finished(self, node: SwarmNode, life: int, version: int) -> None:
        if node.life != life:
            self.counts["lost_with_node"] += 1
            return
        node.in_hand -= 1
        self._groups += 1
        name = self._groups.to_bytes(32, "big")
        informative = self.rng.random() < self.scenario.swarm.informative_share
        group = SwarmGroup(name, version, node, local=True, informative=informative)
        self.counts["generated"] += 1
        added = node.buffer.add(group, node.version)
        if added is Added.STALE:
            self.counts["too_stale"] += 1
        else:
            self._announce(node, group)
            self._train_if_ready(node)
        self._ask(node)

    def _announce(self, node: SwarmNode, group: SwarmGroup) -> None:
        section = self.scenario.swarm
        node.held[group.id] = group
        if len(node.held) > KEPT_GROUPS:
            del node.held[next(iter(node.held))]
        if section.announce == "informative" and not group.is_informative:
            return
        self.counts["announced"] += 1
        message = RolloutAnnouncement(
            group=group.id,
            policy=node.key,
            version=group.oldest_version,
            size_bytes=int(self._group_bytes),
            mean_reward=0.5,
            informative=group.is_informative,
        )
        self.clock.after(self.rng.expovariate(1 / max(section.gossip_s, 1e-9)), self._heard, node, message)

    def _heard(self, author: SwarmNode, message: RolloutAnnouncement) -> None:
        loss = self.scenario.swarm.gossip_loss
        for node in author.neighbours:
            if node.present and self.rng.random() >= loss:
                node.candidates.add(message)
                self.counts["heard"] += 1
                self._pull(node)

    # Pulling

    def _pull(self, node: SwarmNode) -> None:
        """Pull the next group, one at a time, while the learner has too few."""
        if node.pulling or not node.present or node.buffer.external_waiting >= self._target:
            return
        chosen = node.candidates.draw(node.connected)
        if chosen is None:
            return
        node.pulling = True
        author = self.by_key[chosen.policy]
        width = min(author.machine.link.upload_mbps, node.machine.link.download_mbps) * MBIT
        round_trip_s = node.machine.link.round_trip_s + author.machine.link.round_trip_s
        self.clock.after(round_trip_s + self._group_bytes / width, self._pulled, node, node.life, chosen)

    def _pulled(self, node: SwarmNode, life: int, chosen: RolloutAnnouncement) -> None:
        if node.life != life:
            return
        node.pulling = False
        author = self.by_key[chosen.policy]
        group = author.held.get(chosen.group) if author.present else None
        if group is None:
            self.counts["not_found"] += 1
        else:
            self.counts["pulled"] += 1
            self.counts["pulled_bytes"] += int(self._group_bytes)
            copy = SwarmGroup(
                group.id, group.oldest_version, author, local=False, informative=group.is_informative
            )
            added = node.buffer.add(copy, node.version)
            self.counts[f"pulled_{added.value}"] += 1
            self.counts["external_dropped"] += sum(
                1 for name in node.buffer.take_dropped() if name != copy.id
            )
        self._pull(node)

    # Training

    def _train_if_ready(self, node: SwarmNode) -> None:
        run = self.scenario.run
        if node.training_since_s is not None or node.buffer.local_waiting < run.batch_groups:
            return
        batch = node.buffer.take(node.version, run.batch_groups, run.external_groups, self.numpy_rng)
        node.buffer.take_dropped()
        if batch is None:
            return
        for group in (*batch.local, *batch.external):
            self.consumed_twice += group.consumed
            group.consumed = True
        for group in batch.local:
            lag = node.version - group.oldest_version
            self.staleness[lag] += 1
            self.most_stale = max(self.most_stale, lag)
        for group in batch.external:
            self.authors[group.author.machine.number] += 1
        self.counts["local_consumed"] += len(batch.local)
        self.counts["external_consumed"] += len(batch.external)
        node.training_since_s = self.clock.now
        takes_s = lognormal(self.rng, run.train_s, run.train_spread)
        self.clock.after(takes_s, self._trained, node, node.life)
        self._pull(node)
        self._ask(node)

    def _trained(self, node: SwarmNode, life: int) -> None:
        if node.life != life:
            return
        assert node.training_since_s is not None
        self.train_s += self.clock.now - node.training_since_s
        node.training_since_s = None
        node.version += 1
        node.updates += 1
        self.counts["updates"] += 1
        node.buffer.forget_before(node.version - REMEMBERED_VERSIONS)
        self._train_if_ready(node)
        self._ask(node)

    # Nodes come and go

    def _begin_stay(self, node: SwarmNode) -> None:
        node.connected = {PeerId(other.key) for other in node.neighbours if other.present}
        for other in node.neighbours:
            if other.present:
                other.connected.add(PeerId(node.key))
        per_hour = node.machine.kind.departures_per_hour
        if per_hour > 0:
            self.clock.after(self.rng.expovariate(per_hour / 3600), self._depart, node)
        # Not all at the same moment: engines take their time to start.
        self.clock.after(self.rng.random() * self.scenario.run.train_s, self._start, node, node.life)

    def _start(self, node: SwarmNode, life: int) -> None:
        if node.life == life:
            self._train_if_ready(node)
            self._ask(node)

    def _depart(self, node: SwarmNode) -> None:
        self._settle()
        self._present -= 1
        self.counts["departures"] += 1
        node.present = False
        node.life += 1
        node.in_hand = 0
        node.pulling = False
        # An update under way is lost; its groups wait again in the ledger, which this leaves out.
        node.training_since_s = None
        for other in node.neighbours:
            other.connected.discard(PeerId(node.key))
        self._schedule_return(node)

    def _schedule_return(self, node: SwarmNode) -> None:
        self.clock.after(self.rng.expovariate(1 / node.machine.kind.returns_after_s), self._return, node)

    def _return(self, node: SwarmNode) -> None:
        self._settle()
        self._present += 1
        self.counts["joins"] += 1
        node.present = True
        self._begin_stay(node)

    # Numbers

    def _settle(self) -> None:
        self.present_s += self._present * (self.clock.now - self._present_since_s)
        self._present_since_s = self.clock.now

    def _check(self) -> None:
        """After every event."""
        self._checked += 1
        if self.most_stale > self.scenario.run.max_staleness:
            raise InvariantBroken(f"at {self.clock.now:.3f} s: a group {self.most_stale} behind was consumed")
        if self.consumed_twice:
            raise InvariantBroken(f"at {self.clock.now:.3f} s: a group was consumed twice")

    def _check_all(self) -> None:
        for node in self.nodes:
            if len(node.candidates) > MAX_CANDIDATES:
                raise InvariantBroken(
                    f"node {node.machine.number} remembers {len(node.candidates)} candidates"
                )
            if node.in_hand < 0:
                raise InvariantBroken(f"node {node.machine.number} has {node.in_hand} groups in hand")
        used = self.counts["external_consumed"]
        if used > self.counts["pulled"]:
            raise InvariantBroken(f"{used} external groups were consumed, {self.counts['pulled']} pulled")

    def _sample(self) -> None:
        self.clock.after(self.timeline.step_s, self._sample)
        self.timeline.add(
            time_s=self.clock.now,
            present=float(self._present),
            training=float(sum(node.training_since_s is not None for node in self.nodes)),
            updates=float(self.counts["updates"]),
            external_consumed=float(self.counts["external_consumed"]),
            pulled_gigabytes=self.counts["pulled_bytes"] / 1e9,
        )

    def _snapshot(self) -> Counter[str]:
        self._settle()
        now = Counter(self.counts)
        now["train_ms"] = round(1000 * self.train_s)
        now["present_ms"] = round(1000 * self.present_s)
        return now

    def _report(self, before: Counter[str]) -> Report:
        self._check_all()
        over = self._snapshot()
        over.subtract(before)
        scenario, run = self.scenario, self.scenario.run
        span_s = scenario.duration_s - scenario.warmup_s
        present_s = over["present_ms"] / 1000
        updates = max(1, over["updates"])
        return {
            "scenario": scenario.name,
            "kind": "swarm",
            "seed": scenario.seed,
            "simulated_s": scenario.duration_s,
            "events": self.clock.handled,
            "invariants_checked": self._checked,
            "nodes": len(self.nodes),
            "mean_present": present_s / span_s,
            "utilization": over["train_ms"] / max(1, over["present_ms"]),
            "updates": over["updates"],
            "updates_per_node_per_hour": 3600 * over["updates"] / present_s,
            "external_per_update": over["external_consumed"] / updates,
            "external_wanted_per_update": run.external_groups,
            "groups": {
                name: over[name]
                for name in (
                    *("generated", "announced", "heard", "pulled", "pulled_waiting", "pulled_no_advantage"),
                    *("not_found", "external_dropped", "external_consumed", "local_consumed", "too_stale"),
                    "lost_with_node",
                )
            },
            "waste": 1 - over["external_consumed"] / max(1, over["pulled"]),
            "staleness": as_plain(self.staleness),
            "mean_staleness": mean_of(self.staleness),
            "authors": {
                "used": len(self.authors),
                "effective": _effective(self.authors),
                "most_used_share": max(self.authors.values(), default=0) / max(1, sum(self.authors.values())),
            },
            "network": {
                "announcements_per_s": over["announced"] / span_s,
                "pulled_kilobytes_per_node_per_s": over["pulled_bytes"] / 1000 / present_s,
            },
            "churn": {"departures": over["departures"], "joins": over["joins"]},
            "timeline": self.timeline.columns,
        }


def _effective(counts: Counter[int]) -> float:
    """How many equally used authors would be as even: 1 / Σ share²."""
    total = sum(counts.values())
    return total * total / sum(count * count for count in counts.values()) if total else 0.0
