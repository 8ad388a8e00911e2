"""Algorithms: what a loss takes by default, and which options may not stand together, with the reason."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.algorithm import LOSS_DEFAULTS, AlgorithmSpec
from protocol.base import Message
from protocol.refusals import Refused
from protocol.run_spec import RunSpec


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "epsilon", "epsilon_high"),
    [
        ("cispo", "token", 0.2, 5.0),
        ("grpo", "sequence", 0.2, 0.2),
        ("dapo", "token", 0.2, 0.28),
        ("dr_grpo", "constant", 0.2, 0.2),
        ("gspo", "sequence", 3e-4, 4e-4),
        ("decoupled_ppo", "token", 0.2, 0.28),
        ("topr", "token", 0.2, 0.2),
        ("gepo", "sequence", 0.2, 0.2),
        ("oapl", "sequence", 0.2, 0.2),
    ],
)
def test_every_loss_has_its_own_defaults(
    loss_type: Any, aggregation: str, epsilon: float, epsilon_high: float
) -> None:
    spec = AlgorithmSpec(loss_type=loss_type)
    assert (spec.aggregation, spec.epsilon, spec.epsilon_high) == (aggregation, epsilon, epsilon_high)


def test_what_a_loss_brings_can_be_changed() -> None:
    assert AlgorithmSpec().epsilon_high == 5.0
    assert AlgorithmSpec(loss_type="cispo", aggregation="prompt").aggregation == "prompt"
    assert AlgorithmSpec(loss_type="dr_grpo").scale_rewards == "none"
    assert AlgorithmSpec(loss_type="dr_grpo", scale_rewards="group").scale_rewards == "group"
    decoupled = AlgorithmSpec(loss_type="decoupled_ppo")
    assert (decoupled.proximal_policy, decoupled.importance_sampling_mode) == ("loglinear", "token_truncate")
    assert decoupled.importance_sampling_clip_max == 5.0
    masked = AlgorithmSpec(loss_type="decoupled_ppo", importance_sampling_mode="token_mask")
    assert (masked.importance_sampling_clip_min, masked.importance_sampling_clip_max) == (0.5, 5.0)
    one_sided = AlgorithmSpec(importance_sampling_mode="token_mask", importance_sampling_clip_max=3.0)
    assert (one_sided.importance_sampling_clip_min, one_sided.importance_sampling_clip_max) == (None, 3.0)


def test_a_trust_region_of_another_kind_takes_the_place_of_the_clip() -> None:
    for changes in ({"m2_threshold": 0.04}, {"ratio_variance_penalty": 0.04}):
        spec = AlgorithmSpec(loss_type="dapo", **changes)  # type: ignore[arg-type]
        assert (spec.epsilon, spec.epsilon_high, spec.clips) == (1.0, 100.0, False)
    assert AlgorithmSpec(loss_type="cispo", m2_threshold=0.04).epsilon_high == 5.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"importance_sampling_mode": "token_truncate"},
        "would weight by π/μ a second time, cispo does so already",
    ),
    ({"loss_type": "grpo", "importance_sampling_mode": "sequence_truncate"}, "a second time"),
    ({"loss_type": "topr", "proximal_policy": "current"}, "topr has its own weight"),
    ({"loss_type": "gepo", "proximal_policy": "loglinear"}, "gepo has its own weight"),
    ({"loss_type": "topr", "importance_sampling_mode": "sequence_mask"}, "cut the same ratio twice"),
    ({"loss_type": "gepo", "importance_sampling_mode": "sequence_mask"}, "cut the same ratio twice"),
    ({"loss_type": "decoupled_ppo", "proximal_policy": "behavior"}, "without them it is dapo"),
    ({"loss_type": "decoupled_ppo", "importance_sampling_mode": "none"}, "without them it is dapo"),
    ({"loss_type": "oapl", "importance_sampling_mode": "token_mask"}, "oapl regresses"),
    ({"loss_type": "oapl", "m2_threshold": 0.04}, "oapl regresses"),
    ({"loss_type": "oapl", "off_policy_mask_threshold": 0.5}, "oapl regresses"),
    ({"loss_type": "oapl", "ratio_variance_penalty": 0.1}, "oapl regresses"),
    ({"loss_type": "oapl", "top_entropy_quantile": 0.2}, "oapl regresses"),
    ({"loss_type": "oapl", "proximal_policy": "current"}, "oapl has its own weight"),
    ({"loss_type": "grpo", "sat_quantile": 0.9, "m2_threshold": 0.04}, "both bound how far"),
    ({"m2_threshold": 0.04, "ratio_variance_penalty": 0.1}, "both bound how far"),
    ({"loss_type": "grpo", "m2_threshold": 0.04, "epsilon": 0.2}, "leave out epsilon"),
    ({"loss_type": "dapo", "ratio_variance_penalty": 0.04, "epsilon_high": 0.28}, "leave out epsilon"),
    ({"sat_quantile": 0.9}, "here nothing is clipped"),
    ({"loss_type": "grpo", "sat_quantile": 0.9, "epsilon": 1.0, "epsilon_high": 100.0}, "nothing is clipped"),
    ({"loss_type": "grpo", "sat_quantile": 0.9, "proximal_policy": "current"}, "always 1"),
    ({"loss_type": "grpo", "delta": 4.0, "proximal_policy": "current"}, "always 1"),
    ({"delta": 4.0}, "cispo clips none"),
    ({"loss_type": "grpo", "delta": 1.1}, "clip the same ratio twice"),
    ({"loss_type": "dapo", "delta": 4.0, "importance_sampling_mode": "token_mask"}, "from above"),
    ({"loss_type": "gspo", "importance_sampling_level": "token"}, "leave that option out"),
    ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "not for dapo"),
    ({"ratio_variance_target": 0.1}, "start above 0"),
    ({"importance_sampling_clip_max": 2.0}, "needs importance_sampling_mode"),
    (
        {
            "importance_sampling_mode": "token_mask",
            "importance_sampling_clip_min": 5.0,
            "importance_sampling_clip_max": 0.5,
        },
        "must be below",
    ),
    (
        {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": None},
        "needs importance_sampling_clip_min or",
    ),
    ({"loss_type": "magic"}, "cispo"),
    ({"epsilon": 0.0}, "greater"),
    ({"unknown": 1}, "Extra inputs"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_would_count_twice_or_not_at_all_is_refused_with_the_reason(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        AlgorithmSpec.model_validate(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"importance_sampling_mode": "token_mask", "off_policy_mask_threshold": 0.5},
        {"proximal_policy": "current", "importance_sampling_mode": "sequence_truncate"},
        {"loss_type": "grpo", "delta": 4.0, "sat_quantile": 0.9, "negative_veto_threshold": 0.1},
        {"loss_type": "gspo", "sat_quantile": 0.9, "off_policy_mask_threshold": 0.5},
        {"loss_type": "dapo", "m2_threshold": 0.04, "negative_veto_threshold": 0.1, "beta": 0.01},
        {"loss_type": "decoupled_ppo", "sat_quantile": 0.9, "ess_lr_scaling": True},
        {"loss_type": "gepo", "importance_sampling_mode": "token_mask", "beta": 0.01},
        {"loss_type": "oapl", "beta": 0.01},
        {"ratio_variance_penalty": 0.04, "ratio_variance_target": 0.1, "top_entropy_quantile": 0.2},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_composes_survives_its_encoding(changes: dict[str, Any]) -> None:
    spec = AlgorithmSpec.model_validate(changes)
    assert AlgorithmSpec.decode(spec.encode()) == spec
    # Printed without what is None, as a configuration file is, it reads back the same.
    printed = {name: value for name, value in spec.model_dump().items() if value is not None}
    assert AlgorithmSpec.model_validate(printed) == spec


def test_a_spec_on_the_wire_names_every_field() -> None:
    plain = AlgorithmSpec().model_dump()
    assert plain.keys() == AlgorithmSpec.model_fields.keys()
    shorter = {name: value for name, value in plain.items() if name != "epsilon_high"}

    class Loose(Message):
        loss_type: str
        epsilon: float

    with pytest.raises(Refused, match="not every field"):
        AlgorithmSpec.decode(Loose(loss_type="cispo", epsilon=shorter["epsilon"]).encode())


def test_defaults_name_every_loss_and_only_known_options() -> None:
    assert set(LOSS_DEFAULTS) == set(AlgorithmSpec.model_fields["loss_type"].annotation.__args__)  # type: ignore[union-attr]
    for defaults in LOSS_DEFAULTS.values():
        assert defaults.keys() <= AlgorithmSpec.model_fields.keys()


def test_gepo_takes_no_groups_whose_behavior_is_unknown(spec: RunSpec) -> None:
    swarm = dict(spec) | {"preset": "swarm", "learners": [], "external_groups": 2}
    RunSpec.model_validate(swarm)
    with pytest.raises(ValidationError, match="external_groups must be 0"):
        RunSpec.model_validate(swarm | {"algorithm": AlgorithmSpec(loss_type="gepo")})


def test_the_document_explains_every_loss_and_option_of_a_correction() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text("utf-8")
    words = set(re.findall(r"[a-z_0-9]+", text))
    optimizer = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "warmup_updates"}
    assert AlgorithmSpec.model_fields.keys() - optimizer <= words
    assert set(LOSS_DEFAULTS) <= words
