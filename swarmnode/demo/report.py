"""What a demo measured, as plain values for JSON and as lines for people."""

from collections import Counter
from typing import Any


def summarize(
    preset: str, names: list[str], states: list[dict[str, Any] | None], wall_s: float
) -> dict[str, Any]:
    """One result for the whole demo; in preset `swarm` accuracies are means over the nodes."""
    known = [(name, state) for name, state in zip(names, states, strict=True) if state is not None]
    learners = [state for _, state in known if state["learner"] is not None]
    refused: Counter[str] = Counter()
    for _, state in known:
        refused.update(state["refused"])
    return {
        "preset": preset,
        "eval_before": _mean([state["learner"]["eval_before"] for state in learners]),
        "eval_after": _mean([state["learner"]["eval_after"] for state in learners]),
        "updates": sum(state["learner"]["updates"] for state in learners),
        "published_versions": sum(state["learner"]["published_versions"] for state in learners),
        "accepted_groups": sum(state["groups"]["accepted"] for state in learners),
        "refused": dict(refused),
        "max_staleness_seen": max((state["max_staleness_seen"] for state in learners), default=0),
        "wall_s": round(wall_s, 1),
        "nodes": {name: _node(state) for name, state in known},
    }


def _node(state: dict[str, Any]) -> dict[str, Any]:
    me = next(node for node in state["nodes"] if node["self"])
    values: dict[str, Any] = {
        "role": me["role"],
        "version": me["version"],
        "groups_per_min": me["groups_per_min"],
        "tokens_per_s": me["tokens_per_s"],
        "rss_mb": me["rss_mb"],
        "contribution": state["my_contribution"],
    }
    if state["learner"] is not None:
        values["learner"] = state["learner"]
        values["groups"] = state["groups"]
        values["staleness"] = state["staleness"]
    return values


def _mean(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None
