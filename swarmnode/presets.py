"""The two presets: what a run is when nobody says otherwise. Figures are for the tiny model; see docs for
others."""

from typing import Any

from swarmnode.config import ConfigError
from swarmnode.models.tiny_tasks import DEMO_MAX_NEW_TOKENS

TINY_ALGORITHM: dict[str, Any] = {
    "loss_type": "cispo",
    "learning_rate": 3e-4,
    "scale_rewards": "group",
    "max_grad_norm": 1.0,
}
"""For the tiny model, whose one million weights bear large steps."""

DEFAULT_ALGORITHM: dict[str, Any] = {"loss_type": "cispo", "learning_rate": 1e-6}


def demo_run_section(preset: str, *, model: str = "tiny", mode: str = "async") -> dict[str, Any]:
    """The [run] section of a preset as plain values. Raises `ConfigError` for an unknown preset or mode."""
    if preset not in ("fleet", "swarm"):
        raise ConfigError(f"--preset {preset}: there are two presets, fleet and swarm")
    if mode not in ("async", "sequential"):
        raise ConfigError(f"--mode {mode}: there are two modes, async and sequential")
    tiny = model == "tiny"
    section: dict[str, Any] = {
        "name": f"{preset}-demo",
        "preset": preset,
        "mode": mode,
        "model": model,
        "max_new_tokens": DEMO_MAX_NEW_TOKENS if tiny else 32,
        "group_size": 8,
        "max_staleness": 0 if mode == "sequential" else 4,
        "local_groups": 16,
        "pacing_batches": 1 if mode == "sequential" else 2,
        "partial_credit": not tiny,
        "algorithm": TINY_ALGORITHM if tiny else DEFAULT_ALGORITHM,
    }
    if preset == "swarm":
        section |= {"local_groups": 4, "external_groups": 4}
    return section
