"""A state as a node builds it, in the middle of a run, for the tests of the API and the page."""

import math
from typing import Any

START = 1_790_000_000.0


def node_row(name: str, role: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": name.encode().hex().ljust(64, "0")[:64],
        "name": name,
        "role": role,
        "self": False,
        "state": "live",
        "last_seen_s": 0.8,
        "policy": "fleet",
        "version": 12,
        "lag": 0,
        "groups_per_min": 41.6,
        "tokens_per_s": 884.2,
        "accepted": 120,
        "refused": 0,
        "updates": 0,
        "reward": None,
        "accuracy": None,
        "rss_mb": 612.0,
    }
    return row | changes


def curve(
    policy: str, low: float, high: float, updates: int, every: int = 1, noise: float = 0.0
) -> list[dict[str, Any]]:
    """A series that rises from `low` towards `high`; the noise is a fixed pattern, so tests are exact."""
    return [
        {
            "t": START + 2.0 * update,
            "version": update,
            "value": low
            + (high - low) * (1 - math.exp(-update / 18))
            + noise * math.sin(7.3 * update * update),
            "policy": policy,
        }
        for update in range(0, updates + 1, every)
    ]


def figures(entropy: float, ratio: float) -> dict[str, float]:
    """What an update says of some of its tokens."""
    return {
        "tokens": 420.0,
        "entropy": entropy,
        "ratio_mean": ratio,
        "ratio_max": 3 * ratio,
        "kl": (ratio - 1) / 2,
        "token_ess_ratio": 1 / ratio,
        "ess_ratio": 1 / ratio**2,
        "clip_fraction": 0.01,
        "mask_fraction": 0.0,
    }


def example_state() -> dict[str, Any]:
    return {
        "node": {
            "name": "amber-learner",
            "key": "ab" * 32,
            "role": "learner",
            "data_dir": "/home/someone/.swarmnode/amber-learner",
            "uptime_s": 118.4,
            "software": "swarmnode 0.1.0",
            "listen_addrs": ["/ip4/127.0.0.1/tcp/40123"],
            "invite": "swarm1" + "q3k7" * 40,
            "rss_mb": 118.0,
        },
        "run": {
            "id": "5e" * 32,
            "name": "demo",
            "preset": "fleet",
            "mode": "async",
            "model": "tiny",
            "max_staleness": 4,
            "group_size": 8,
            "batch_groups": 16,
        },
        "policy": {"id": "cd" * 32, "name": "fleet", "version": 58, "swarm_version": 58, "lag": 0},
        "transfer": None,
        "learner": {
            "state": "training",
            "updates": 58,
            "published_versions": 58,
            "eval_before": 0.328125,
            "eval_after": 0.84375,
            "final": False,
            "halted": None,
            "metrics": {"loss": 0.02, **figures(0.61, 1.02)},
            "by_age": {"0": figures(0.62, 1.0), "1": figures(0.6, 1.03), "4": figures(0.55, 1.31)},
        },
        "nodes": [
            node_row("amber-learner", "learner", key="ab" * 32, self=True, version=58, groups_per_min=0.0,
                     tokens_per_s=0.0, accepted=0, updates=58, reward=0.79, accuracy=0.84375),
            node_row("birch-worker", "worker", version=58, accepted=520),
            node_row("cedar-worker", "worker", version=57, lag=1, accepted=408, refused=3),
            node_row("dune-relay", "relay", policy=None, version=None, lag=None, groups_per_min=0.0,
                     tokens_per_s=0.0, accepted=0, rss_mb=104.0),
        ],
        "series": {
            "reward": curve("fleet", 0.33, 0.86, 58, noise=0.04),
            "accuracy": [*curve("fleet", 0.328125, 0.87, 50, every=10)],
        },
        "staleness": {"0": 310, "1": 402, "2": 121, "3": 17},
        "max_staleness_seen": 3,
        "groups": {
            "accepted": 928,
            "refused": 5,
            "consumed": 850,
            "waiting": 74,
            "stale": 4,
            "external_consumed": {},
        },
        "refused": {"too_stale": 3, "replayed": 2},
        "my_contribution": {"accepted": 0, "refused": {}, "last_accepted_s": None, "last_refusal": None},
        "events": [
            {"t": START, "level": "info", "text": "started in /home/someone/.swarmnode/amber-learner"},
            {"t": START + 3, "level": "info", "text": "birch-worker joined"},
            {"t": START + 40, "level": "warning", "text": "refused a group of cedar-worker: too_stale"},
            {"t": START + 80, "level": "error", "text": "the rollout process ended; starts again in 1 s"},
        ],
    }  # fmt: skip
