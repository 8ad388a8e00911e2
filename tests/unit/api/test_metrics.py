"""The Prometheus text: right values, bounded cardinality, no duplicate series whatever peers send."""

import math
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from swarmnode.api.metrics import MAX_NODES, render_metrics, staleness_buckets
from tests.unit.api.example_state import example_state, node_row

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(state: dict[str, Any]) -> Samples:
    text = render_metrics(state, state_errors=2, subscribers=1, denied={"host": 3}).decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            place = (sample.name, frozenset(sample.labels.items()))
            assert place not in found, f"duplicate series {place}"
            found[place] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, frozenset(labels.items()))]


def test_the_state_is_told_with_its_values() -> None:
    samples = scrape(example_state())
    assert value(samples, "swarmnode_policy_version", policy="fleet") == 58
    assert value(samples, "swarmnode_updates_total", policy="fleet") == 58
    assert value(samples, "swarmnode_held_out_accuracy", policy="fleet") == 0.84375
    assert value(samples, "swarmnode_groups_accepted_total") == 928
    assert value(samples, "swarmnode_groups_refused_total") == 5
    assert value(samples, "swarmnode_refused_total", reason="too_stale") == 3
    assert value(samples, "swarmnode_nodes", state="live") == 4
    assert value(samples, "swarmnode_resident_memory_bytes") == 118e6
    cedar = {"node": "cedar-worker", "key": b"cedar-worker".hex().ljust(64, "0")}
    assert value(samples, "swarmnode_node_policy_lag", **cedar) == 1
    assert value(samples, "swarmnode_node_tokens_per_second", **cedar) == 884.2
    assert value(samples, "swarmnode_node_up", **cedar, role="worker", policy="fleet") == 1
    assert value(samples, "swarmnode_api_state_errors_total") == 2
    assert value(samples, "swarmnode_api_denied_requests_total", reason="host") == 3


def test_the_last_update_is_told_as_a_whole_and_by_the_age_of_its_tokens() -> None:
    samples = scrape(example_state())
    assert value(samples, "swarmnode_update_ratio_mean", policy="fleet", age="all") == 1.02
    assert value(samples, "swarmnode_update_ratio_mean", policy="fleet", age="4") == 1.31
    assert value(samples, "swarmnode_update_entropy", policy="fleet", age="0") == 0.62
    assert value(samples, "swarmnode_training_halted", policy="fleet") == 0
    halted = example_state()
    halted["learner"]["halted"] = "training halted: the policy has collapsed"
    assert value(scrape(halted), "swarmnode_training_halted", policy="fleet") == 1


def test_staleness_is_a_cumulative_histogram_that_ends_at_the_bound() -> None:
    samples = scrape(example_state())  # 310, 402, 121, 17 groups at staleness 0, 1, 2, 3
    buckets = [
        value(samples, "swarmnode_staleness_versions_bucket", le=edge) for edge in ("0", "1", "2", "3", "4")
    ]
    assert buckets == [310, 712, 833, 850, 850]
    assert value(samples, "swarmnode_staleness_versions_bucket", le="+Inf") == 850
    assert value(samples, "swarmnode_staleness_versions_sum") == 402 + 2 * 121 + 3 * 17


def test_staleness_buckets() -> None:
    assert staleness_buckets(0) == [0]
    assert staleness_buckets(2) == [0, 1, 2]
    assert staleness_buckets(100) == [*range(17), 32, 64, 100]
    assert staleness_buckets(64) == [*range(17), 32, 64]


def test_what_is_not_known_is_left_out() -> None:
    state = example_state() | {
        "policy": None,
        "learner": None,
        "nodes": [node_row("relay", "relay", reward=math.nan)],
    }
    names = {name for name, _ in scrape(state)}
    assert "swarmnode_held_out_accuracy" not in names
    assert "swarmnode_node_reward" not in names
    assert "swarmnode_node_up" in names
    assert "swarmnode_nodes" in {name for name, _ in scrape({})}


def test_hostile_names_neither_break_the_format_nor_collide() -> None:
    name = 'x"} 1\nfake_metric{a="b'
    state = example_state()
    state["nodes"] = [node_row(name, "worker", key="01" * 32), node_row(name, "worker", key="02" * 32)]
    samples = scrape(state)
    assert value(samples, "swarmnode_node_groups_accepted_total", node=name, key="01" * 32) == 120
    assert not any(series.startswith("fake_metric") for series, _ in samples)


def test_cardinality_is_bounded_whatever_peers_send() -> None:
    state = example_state()
    state["nodes"] = [node_row(f"n{i}", "worker", state="gone") for i in range(MAX_NODES + 40)]
    state["nodes"].append(node_row("me", "learner", self=True))
    state["refused"] = {f"invented_{i}": 1 for i in range(100)} | {"replayed": 2}
    samples = scrape(state)
    shown = [labels for name, labels in samples if name == "swarmnode_node_up"]
    assert len(shown) == MAX_NODES
    assert any(("node", "me") in labels for labels in shown)
    assert value(samples, "swarmnode_nodes_omitted") == 41
    assert value(samples, "swarmnode_nodes", state="gone") == MAX_NODES + 40
    assert value(samples, "swarmnode_refused_total", reason="other") == 100
    assert value(samples, "swarmnode_refused_total", reason="replayed") == 2
