"""The node's state as the page, `status` and metrics show it: rebuilt every second, read by the API
thread."""

import time
from typing import TYPE_CHECKING, Any

import trio

from peers.membership import MemberInfo
from swarmnode import __version__

if TYPE_CHECKING:
    from swarmnode.runtime.node import Node
    from swarmnode.runtime.roles import Roles

EVERY_S = 1.0
MAX_ROWS = 500
"""Nodes shown: live ones first, connected ones before those known by hearsay."""


class StateBuilder:
    """`latest` may be called from any thread: it returns a dict that nobody changes any more."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._started = trio.current_time()
        self._stored: dict[str, Any] = {
            "counts": {},
            "by_sender": {},
            "external": {},
            "receipts": {},
            "last": None,
        }
        self._state = self._build()

    def latest(self) -> dict[str, Any]:
        """The newest state."""
        return self._state

    async def run(self) -> None:
        """Rebuild until cancelled."""
        while True:
            self._stored = await self._node.store.run(
                lambda store: {
                    "counts": store.counts(),
                    "by_sender": store.accepted_by_sender(),
                    "external": store.consumed_external_by_sender(),
                    "receipts": store.receipts(),
                    "last": store.counter("last_accepted_unix"),
                }
            )
            self._state = self._build()
            await trio.sleep(EVERY_S)

    def _build(self) -> dict[str, Any]:
        node, roles = self._node, self._node.roles
        assert roles is not None
        spec = node.spec
        counts = self._stored["counts"]
        learner = roles.learner
        staleness = {} if learner is None else dict(learner.status.staleness)
        return {
            "node": {
                "name": node.name,
                "key": node.identity.key.hex(),
                "role": node.role,
                "data_dir": str(node.directory.root),
                "uptime_s": trio.current_time() - self._started,
                "software": f"swarmnode {__version__}",
                "listen_addrs": node.transport.addresses,
                "invite": node.invite_text(),
                "rss_mb": node.rss_mb,
                "seeds": [str(seed) for seed in node.discovery.seed_status()],
                "state": "" if roles.worker is None else roles.worker.state,
            },
            "run": {
                "id": spec.run_id.hex(),
                "name": spec.name,
                "preset": spec.preset,
                "mode": spec.mode,
                "model": spec.model.name,
                "max_staleness": spec.max_staleness,
                "group_size": spec.sampling.group_size,
                "batch_groups": spec.local_groups + spec.external_groups,
            },
            "policy": self._policy(roles),
            "transfer": self._transfer(roles),
            "learner": self._learner(roles),
            "nodes": [self._self_row(roles), *self._member_rows()],
            "series": node.journal.series,
            "staleness": {str(lag): count for lag, count in sorted(staleness.items())},
            "max_staleness_seen": 0 if learner is None else learner.status.max_staleness_seen,
            "groups": {
                "accepted": sum(counts.get(state, 0) for state in ("consumed", "accepted", "stale")),
                "refused": sum(node.refused.values()),
                "consumed": counts.get("consumed", 0),
                "waiting": counts.get("accepted", 0),
                "stale": counts.get("stale", 0),
                "external_consumed": self._by_name(self._stored["external"]),
            },
            "refused": dict(node.refused),
            "my_contribution": self._contribution(roles),
            "events": list(node.journal.events),
        }

    def _policy(self, roles: "Roles") -> dict[str, Any] | None:
        if roles.policy is None:
            return None
        version = roles.version
        newest = self._swarm_version(roles)
        lag = None if version is None or newest is None else max(0, newest - version)
        return {
            "id": roles.policy.hex(),
            "name": self._node.name_of(roles.policy),
            "version": version,
            "swarm_version": newest,
            "lag": lag,
        }

    def _transfer(self, roles: "Roles") -> dict[str, Any] | None:
        transfer = None if roles.follower is None else roles.follower.transfer
        return None if transfer is None else transfer.state()

    def _swarm_version(self, roles: "Roles") -> int | None:
        heard = [roles.version] if roles.version is not None else []
        if roles.follower is not None and roles.follower.newest_heard is not None:
            heard.append(roles.follower.newest_heard)
        return max(heard, default=None)

    def _learner(self, roles: "Roles") -> dict[str, Any] | None:
        if roles.learner is None:
            return None
        status = roles.learner.status
        return {
            "state": status.state,
            "updates": status.updates,
            "published_versions": status.published_versions,
            "eval_before": status.eval_before,
            "eval_after": status.eval_after,
            "final": status.final,
            "halted": status.halted,
            "metrics": status.metrics,
            "by_age": {str(lag): figures for lag, figures in sorted(status.by_age.items())},
        }

    def _self_row(self, roles: "Roles") -> dict[str, Any]:
        node = self._node
        figures = roles.figures()
        policy = self._policy(roles)
        return {
            "key": node.identity.key.hex(),
            "name": node.name,
            "role": node.role,
            "self": True,
            "state": "live",
            "last_seen_s": 0.0,
            "policy": None if policy is None else policy["name"],
            "version": roles.version,
            "lag": None if policy is None else policy["lag"],
            "groups_per_min": figures.get("groups_per_min", 0.0),
            "tokens_per_s": figures.get("tokens_per_s", 0.0),
            "accepted": figures.get("accepted", 0),
            "refused": figures["refused"],
            "updates": figures.get("updates", 0),
            "reward": figures.get("reward"),
            "accuracy": figures.get("accuracy"),
            "rss_mb": node.rss_mb,
        }

    def _member_rows(self) -> list[dict[str, Any]]:
        node = self._node
        now = trio.current_time()
        members = list(node.discovery.members().values())
        newest = self._newest_versions(members)
        rows = []
        for member in sorted(members, key=lambda one: self._importance(one, now))[:MAX_ROWS]:
            silent_s = now - member.last_heard_s
            gone = self._is_gone(member, now)
            presence = member.presence
            held = next(iter(member.hello.policies), None)
            lag = None if held is None else max(0, newest.get(held.policy, held.version) - held.version)
            rows.append(
                {
                    "key": member.key.hex(),
                    "name": member.hello.name,
                    "role": member.hello.role,
                    "self": False,
                    "state": "gone" if gone else "live",
                    "last_seen_s": silent_s,
                    "policy": None if held is None else self._node.name_of(held.policy),
                    "version": None if held is None else held.version,
                    "lag": lag,
                    "groups_per_min": 0.0 if presence is None or gone else presence.groups_per_min,
                    "tokens_per_s": 0.0 if presence is None or gone else presence.tokens_per_s,
                    "accepted": self._accepted_of(member.key, 0 if presence is None else presence.accepted),
                    "refused": 0 if presence is None else presence.refused,
                    "updates": 0 if presence is None else presence.updates,
                    "reward": None if presence is None else presence.reward,
                    "accuracy": None if presence is None else presence.accuracy,
                    "rss_mb": 0.0 if presence is None else presence.rss_mb,
                }
            )
        return sorted(rows, key=lambda row: (row["role"], row["name"], row["key"]))

    def _is_gone(self, member: MemberInfo, now: float) -> bool:
        return member.left or now - member.last_heard_s > self._node.config.network.gone_after_s

    def _importance(self, member: MemberInfo, now: float) -> tuple[bool, bool, bool, str]:
        return (self._is_gone(member, now), not member.connected, not member.direct, member.hello.name)

    def _newest_versions(self, members: list[MemberInfo]) -> dict[bytes, int]:
        """The newest version of each policy: only its own learner knows, others may claim anything."""
        newest = {
            progress.policy: progress.version
            for member in members
            for progress in member.hello.policies
            if progress.policy == member.key
        }
        own = self._node.roles
        if own is not None and own.policy is not None:
            known = self._swarm_version(own)
            if known is not None:
                newest[own.policy] = max(known, newest.get(own.policy, 0))
        return newest

    def _by_name(self, counts: dict[bytes, int]) -> dict[str, int]:
        """Counts by the senders' names; of two with the same name, the second carries its key."""
        named: dict[str, int] = {}
        for sender, count in counts.items():
            name = self._node.name_of(sender)
            named[f"{name} {sender.hex()[:6]}" if name in named else name] = count
        return named

    def _accepted_of(self, key: bytes, claimed: int) -> int:
        """A learner goes by its own ledger; others by what the node says."""
        roles = self._node.roles
        if roles is not None and roles.learner is not None and self._node.role == "learner":
            return int(self._stored["by_sender"].get(key, 0))
        return claimed

    def _contribution(self, roles: "Roles") -> dict[str, Any]:
        receipts = dict(self._stored["receipts"])
        accepted = receipts.pop("accepted", 0)
        last = self._stored["last"]
        return {
            "accepted": accepted,
            "refused": receipts,
            "last_accepted_s": None if last is None else max(0.0, time.time() - last),
            "last_refusal": None if roles.worker is None else roles.worker.last_refusal,
        }
