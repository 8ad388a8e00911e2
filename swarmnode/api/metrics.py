"""The state as Prometheus metrics, in a registry made anew for every scrape.

Cardinality is bounded whatever peers send: `MAX_NODES` nodes, the closed list of refusal reasons, a fixed
number of staleness buckets. A node's series carry its whole key, because two peers may choose the same name
and one duplicate series would make Prometheus reject everything.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from protocol.limits import MAX_NAME_CHARS
from protocol.refusals import RefusalReason

__all__ = ["CONTENT_TYPE", "MAX_NODES", "render_metrics"]

MAX_NODES = 256
MAX_LABEL_CHARS = MAX_NAME_CHARS
KNOWN_REASONS = frozenset(reason.value for reason in RefusalReason)

NODE_GAUGES = {
    "last_seen_s": ("node_last_seen_seconds", "Seconds since anything was heard from the node"),
    "version": ("node_policy_version", "Policy version that the node uses"),
    "lag": ("node_policy_lag", "Versions that the node is behind its policy's newest"),
    "groups_per_min": ("node_groups_per_minute", "Rollout groups that the node generates per minute"),
    "tokens_per_s": ("node_tokens_per_second", "Tokens that the node generates per second"),
    "reward": ("node_reward", "Mean reward of the node's latest update"),
    "accuracy": ("node_held_out_accuracy", "Held-out accuracy of the node's policy, 0 to 1"),
}
UPDATE_GAUGES = {
    "tokens": "Tokens trained on",
    "entropy": "Entropy of the policy, nats per token",
    "ratio_mean": "Mean of the policy's probability of a token over the behavior policy's",
    "ratio_max": "Largest of these ratios",
    "kl": "Divergence of the behavior policy from the policy, nats per token",
    "token_ess_ratio": "Effective share of the tokens under these ratios",
    "ess_ratio": "Effective share of the completions under these ratios",
    "clip_fraction": "Share of tokens whose ratio the loss clipped",
    "mask_fraction": "Share of tokens that a correction masked",
}
"""Figures of the last update: of all its tokens (age "all") and by how many versions ago they were made."""
NODE_COUNTERS = {
    "accepted": ("node_groups_accepted", "The node's rollout groups that were accepted"),
    "refused": ("node_groups_refused", "The node's rollout groups that were refused"),
    "updates": ("node_updates", "Optimizer steps that the node made"),
}
GROUP_COUNTERS = {
    "accepted": ("groups_accepted", "Rollout groups accepted by this node"),
    "consumed": ("groups_consumed", "Rollout groups that this node trained on"),
    "refused": ("groups_refused", "Rollout groups refused by this node"),
    "stale": ("groups_stale", "Accepted rollout groups that became too stale to train on"),
}


def render_metrics(
    state: Mapping[str, Any], state_errors: int, subscribers: int, denied: Mapping[str, int]
) -> bytes:
    """The text format of everything. A value that the state lacks is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector([*_from_state(state), *_from_api(state_errors, subscribers, denied)]))
    return generate_latest(registry)


class _Collector:
    """What a registry wants: an object with `collect`."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _from_api(state_errors: int, subscribers: int, denied: Mapping[str, int]) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "swarmnode_api_state_errors", "Failures to read the node's state", value=state_errors
    )
    yield GaugeMetricFamily("swarmnode_api_subscribers", "Open event streams", value=subscribers)
    family = CounterMetricFamily("swarmnode_api_denied_requests", "Requests not answered", labels=["reason"])
    for reason, count in sorted(denied.items()):
        family.add_metric([reason], count)
    yield family


def _from_state(state: Mapping[str, Any]) -> Iterable[Metric]:
    node, run, policy, learner, groups = (
        _mapping(state.get(name)) for name in ("node", "run", "policy", "learner", "groups")
    )
    info = InfoMetricFamily("swarmnode", "This node and its run")
    names = {
        "node": node.get("name"),
        "key": node.get("key"),
        "role": node.get("role"),
        "software": node.get("software"),
        "run": run.get("id"),
        "preset": run.get("preset"),
        "policy": policy.get("id"),
    }
    info.add_metric([], {name: _label(value) for name, value in names.items()})
    yield info
    yield from _gauge("uptime_seconds", "Seconds since the node started", node.get("uptime_s"))
    yield from _gauge("resident_memory_bytes", "Memory of the node process", node.get("rss_mb"), scale=1e6)
    yield from _gauge("max_staleness", "The staleness bound S", run.get("max_staleness"))
    yield from _gauge("max_staleness_seen", "Largest staleness trained on", state.get("max_staleness_seen"))

    label = {"policy": _label(policy.get("name") or policy.get("id"))}
    yield from _gauge("policy_version", "Policy version in use here", policy.get("version"), label)
    yield from _gauge(
        "policy_swarm_version", "Newest policy version known", policy.get("swarm_version"), label
    )
    yield from _gauge("policy_lag", "Versions behind the newest one known", policy.get("lag"), label)
    yield from _counter("updates", "Optimizer steps", learner.get("updates"), label)
    yield from _counter("published_versions", "Versions published", learner.get("published_versions"), label)
    yield from _gauge(
        "held_out_accuracy_before", "Before training, 0 to 1", learner.get("eval_before"), label
    )
    yield from _gauge("held_out_accuracy", "Latest evaluation, 0 to 1", learner.get("eval_after"), label)

    yield from _last_update(learner, label)

    for field, (name, text) in GROUP_COUNTERS.items():
        yield from _counter(name, text, groups.get(field))
    yield from _gauge(
        "groups_waiting", "Rollout groups accepted and not yet trained on", groups.get("waiting")
    )
    yield _refused(_mapping(state.get("refused")))
    yield from _staleness(_mapping(state.get("staleness")), _number(run.get("max_staleness")))
    yield from _nodes(state.get("nodes"))


def _last_update(learner: Mapping[Any, Any], label: Mapping[str, str]) -> Iterable[Metric]:
    if not learner:
        return
    halted = float(learner.get("halted") is not None)
    yield from _gauge("training_halted", "1 when training stopped for good; the page says why", halted, label)
    ages = {"all": learner.get("metrics"), **_mapping(learner.get("by_age"))}
    for field, text in UPDATE_GAUGES.items():
        family = GaugeMetricFamily(f"swarmnode_update_{field}", text, labels=[*label, "age"])
        for age, figures in ages.items():
            _add(family, [*label.values(), str(age)], _mapping(figures).get(field))
        yield family


def _refused(refused: Mapping[Any, Any]) -> Metric:
    family = CounterMetricFamily("swarmnode_refused", "Refused from peers, by reason", labels=["reason"])
    totals: dict[str, float] = {}
    for reason, count in refused.items():
        name = reason if reason in KNOWN_REASONS else "other"
        totals[name] = totals.get(name, 0) + (_number(count) or 0)
    for name, total in sorted(totals.items()):
        family.add_metric([name], total)
    return family


def _staleness(counts: Mapping[Any, Any], bound: float | None) -> Iterable[Metric]:
    pairs = [
        (value, _number(count) or 0.0)
        for key, count in counts.items()
        if (value := _integer(key)) is not None
    ]
    edges = staleness_buckets(int(bound or 0))
    buckets = [(str(edge), sum(count for value, count in pairs if value <= edge)) for edge in edges]
    total = sum(count for _, count in pairs)
    family = HistogramMetricFamily("swarmnode_staleness_versions", "Staleness of the groups trained on")
    family.add_metric([], [*buckets, ("+Inf", total)], sum_value=sum(value * count for value, count in pairs))
    yield family


def staleness_buckets(bound: int) -> list[int]:
    """Bucket edges that end with the bound: every integer up to 16, then powers of two."""
    if bound <= 16:
        return list(range(bound + 1))
    powers = [2**power for power in range(5, bound.bit_length()) if 2**power < bound]
    return [*range(17), *powers, bound]


def _nodes(rows: Any) -> Iterable[Metric]:
    unique = {_label(row.get("key")): row for row in rows or [] if isinstance(row, Mapping)}
    ranked = sorted(
        unique.items(), key=lambda item: (not item[1].get("self"), item[1].get("state") != "live", item[0])
    )
    shown = [([_label(row.get("name")), key], row) for key, row in ranked[:MAX_NODES]]
    live = sum(row.get("state") == "live" for row in unique.values())

    swarm = GaugeMetricFamily("swarmnode_nodes", "Nodes known, this one included", labels=["state"])
    swarm.add_metric(["live"], live)
    swarm.add_metric(["gone"], len(unique) - live)
    yield swarm
    yield GaugeMetricFamily(
        "swarmnode_nodes_omitted", "Nodes left out of the per-node series", value=len(unique) - len(shown)
    )

    labels = ["node", "key"]
    up = GaugeMetricFamily("swarmnode_node_up", "1 when the node is live", labels=[*labels, "role", "policy"])
    memory = GaugeMetricFamily(
        "swarmnode_node_resident_memory_bytes", "Memory the node reports", labels=labels
    )
    for who, row in shown:
        up.add_metric(
            [*who, _label(row.get("role")), _label(row.get("policy"))], float(row.get("state") == "live")
        )
        _add(memory, who, row.get("rss_mb"), 1e6)
    yield up
    yield memory
    for kind, fields in ((GaugeMetricFamily, NODE_GAUGES), (CounterMetricFamily, NODE_COUNTERS)):
        for field, (name, text) in fields.items():
            family = kind(f"swarmnode_{name}", text, labels=labels)
            for who, row in shown:
                _add(family, who, row.get(field))
            yield family


def _add(family: Any, labels: list[str], value: Any, scale: float = 1.0) -> None:
    number = _number(value)
    if number is not None:
        family.add_metric(labels, number * scale)


def _gauge(
    name: str, text: str, value: Any, labels: Mapping[str, str] | None = None, scale: float = 1.0
) -> Iterable[Metric]:
    family = GaugeMetricFamily(f"swarmnode_{name}", text, labels=list(labels or {}))
    _add(family, list((labels or {}).values()), value, scale)
    yield family


def _counter(name: str, text: str, value: Any, labels: Mapping[str, str] | None = None) -> Iterable[Metric]:
    family = CounterMetricFamily(f"swarmnode_{name}", text, labels=list(labels or {}))
    _add(family, list((labels or {}).values()), value)
    yield family


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _label(value: Any) -> str:
    return "" if value is None else str(value)[:MAX_LABEL_CHARS]
