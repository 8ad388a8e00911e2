"""How a learner turns groups into updates: the loss, its corrections for stale data, the optimizer.

Names are TRL's where TRL has one, without its prefix `vllm_`. Every field travels: what a loss takes when
nobody says otherwise is filled in when a spec is made, so a run's id covers it. Notation: π is the policy in
training, μ the behavior policy, q the proximal policy that π may move away from in this update, and
π/μ = (q/μ) · (π/q). A combination that would weight or clip one ratio twice is refused with the reason.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from protocol.base import Message

LossType = Literal["cispo", "grpo", "dapo", "dr_grpo", "gspo", "decoupled_ppo", "topr", "gepo", "oapl"]
Aggregation = Literal["token", "sequence", "prompt", "constant"]
ImportanceSamplingMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
ProximalPolicy = Literal["behavior", "current", "loglinear"]

CLIP_LOSSES = frozenset({"grpo", "dapo", "dr_grpo", "gspo", "decoupled_ppo"})
"""Losses that clip their ratio to [1 − epsilon, 1 + epsilon_high]."""

NO_CLIP = {"epsilon": 1.0, "epsilon_high": 100.0}
"""A clip that never acts."""

LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cispo": {"aggregation": "token", "epsilon_high": 5.0},
    "grpo": {"aggregation": "sequence"},
    "dapo": {"aggregation": "token", "epsilon_high": 0.28},
    "dr_grpo": {"aggregation": "constant", "scale_rewards": "none"},
    "gspo": {
        "aggregation": "sequence",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "decoupled_ppo": {
        "aggregation": "token",
        "epsilon_high": 0.28,
        "proximal_policy": "loglinear",
        "importance_sampling_mode": "token_truncate",
        "importance_sampling_clip_max": 5.0,
    },
    "topr": {"aggregation": "token"},
    "gepo": {"aggregation": "sequence"},
    "oapl": {"aggregation": "sequence", "scale_rewards": "none"},
}
"""What a loss takes where nobody says otherwise."""

MODE_DEFAULTS: dict[str, dict[str, Any]] = {
    "token_truncate": {"importance_sampling_clip_max": 2.0},
    "token_mask": {"importance_sampling_clip_min": 0.5, "importance_sampling_clip_max": 5.0},
    "sequence_truncate": {"importance_sampling_clip_max": 8.0},
    "sequence_mask": {"importance_sampling_clip_max": 3.0},
}
"""Bounds of each importance sampling mode: as verl, IcePop, VCPO and TRL ship them."""

IMPORTANCE_BOUNDS = ("importance_sampling_clip_min", "importance_sampling_clip_max")

TRUST_REGIONS = ("sat_quantile", "m2_threshold", "ratio_variance_penalty")

Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e6)]


class AlgorithmSpec(Message):
    """How a learner of this run turns groups into updates (`docs/algorithms.md` explains every option)."""

    loss_type: LossType = "cispo"
    aggregation: Aggregation = "token"
    """The mean over a batch: of all its tokens, of its completions' means, of its prompts' means, or the sum
    over (completions × max_new_tokens)."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip: 1 − epsilon. 1 is no clip."""
    epsilon_high: Annotated[float, Field(gt=0, le=100)] = 0.2
    """Upper clip: 1 + epsilon_high; for `cispo` the cap of the ratio itself, as in TRL."""
    delta: Annotated[float, Field(gt=1, le=1e6)] | None = None
    """Two-sided clip: where the advantage is negative, a ratio above this carries no gradient."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    proximal_policy: ProximalPolicy = "behavior"
    """q: μ itself; the policy at the start of the update; or between them by the token's staleness."""
    importance_sampling_mode: ImportanceSamplingMode = "none"
    """How q/μ (π/μ where q is μ) weights or masks tokens or whole completions."""
    importance_sampling_clip_min: Annotated[float, Field(ge=0, le=1e6)] | None = None
    importance_sampling_clip_max: Positive | None = None
    sat_quantile: Share | None = None
    """SAT: clip bounds shrink for tokens whose |log π/μ| is beyond this quantile of the batch."""
    sat_exponent: Annotated[float, Field(gt=0, le=16)] = 2.0
    m2_threshold: Positive | None = None
    """M2PO: mask the largest |log π/μ| until the mean of their squares is at most this."""
    off_policy_mask_threshold: Positive | None = None
    """OPSM: a completion with negative advantage is masked when its mean log μ/π is above this."""
    negative_veto_threshold: Share | None = None
    """Where the advantage is negative: from the first token with π/μ below this on, all are masked."""
    ratio_variance_penalty: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """R²VPO: λ of the penalty λ·(π/μ − 1)²."""
    ratio_variance_target: Positive | None = None
    """R²VPO: λ rises while the mean of (π/μ − 1)² is above this and falls while it is below."""
    beta: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the KL divergence to the base model (its estimator k3)."""
    use_bias_correction_kl: bool = True
    """Whether that KL term is weighted by π/μ, so that its mean is right on stale data too."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only this share of a batch's tokens, those with the highest entropy, carries the loss."""
    oapl_beta1: Positive = 1.0
    """`oapl`: temperature of the value estimate."""
    oapl_beta2: Positive = 1e-3
    """`oapl`: weight of the log-ratio in the regression."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    ess_lr_scaling: bool = False
    """Multiply the learning rate by √(effective share of the batch's completions)."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    max_grad_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    warmup_updates: Annotated[int, Field(ge=0, le=100_000)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        loss = value.get("loss_type", "cispo")
        filled = {**LOSS_DEFAULTS.get(loss, {}), **value} if isinstance(loss, str) else dict(value)
        if loss in CLIP_LOSSES and (value.get("m2_threshold") or value.get("ratio_variance_penalty")):
            filled |= {**NO_CLIP, **value}
        mode = value.get("importance_sampling_mode")
        if isinstance(mode, str) and not any(name in value for name in IMPORTANCE_BOUNDS):
            filled |= {**dict.fromkeys(IMPORTANCE_BOUNDS), **MODE_DEFAULTS.get(mode, {})}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in (self._loss_problem(), self._weight_problem(), self._trust_region_problem()):
            if problem is not None:
                raise ValueError(problem)
        return self

    @property
    def clips(self) -> bool:
        """Whether the clip of the loss's ratio ever acts."""
        return self.loss_type in CLIP_LOSSES and (
            self.epsilon < NO_CLIP["epsilon"] or self.epsilon_high < NO_CLIP["epsilon_high"]
        )

    @property
    def weight_mode(self) -> Literal["truncate", "mask"] | None:
        """What `importance_sampling_mode` does."""
        if self.importance_sampling_mode == "none":
            return None
        return "truncate" if self.importance_sampling_mode.endswith("truncate") else "mask"

    def _loss_problem(self) -> str | None:
        """Options that this loss would not read, or cannot have."""
        loss = self.loss_type
        if self.importance_sampling_level == "sequence" and loss not in ("grpo", "gspo"):
            return f"importance_sampling_level 'sequence' is for grpo (which is then gspo), not for {loss}"
        if loss == "gspo" and self.importance_sampling_level == "token":
            return "gspo is grpo with importance_sampling_level 'sequence': leave that option out"
        if loss == "oapl":
            return self._oapl_problem()
        if self.delta is not None:
            if loss not in CLIP_LOSSES:
                return f"delta bounds the clipped ratio of {_names(CLIP_LOSSES)}; {loss} clips none"
            if self.delta <= 1 + self.epsilon_high:
                return (
                    f"delta = {self.delta:g} must be above 1 + epsilon_high = {1 + self.epsilon_high:g}: "
                    "inside the clip range it would clip the same ratio twice"
                )
        if self.ratio_variance_target is not None and self.ratio_variance_penalty == 0:
            return "ratio_variance_target moves ratio_variance_penalty: give that one a start above 0"
        return None

    def _oapl_problem(self) -> str | None:
        used = [
            name
            for name in (
                *("delta", "sat_quantile", "m2_threshold", "off_policy_mask_threshold"),
                *("negative_veto_threshold", "ratio_variance_target"),
            )
            if getattr(self, name) is not None
        ]
        used += ["ratio_variance_penalty"] if self.ratio_variance_penalty else []
        used += ["importance_sampling_mode"] if self.importance_sampling_mode != "none" else []
        used += ["top_entropy_quantile"] if self.top_entropy_quantile < 1 else []
        if used:
            return (
                f"oapl regresses log π/μ of whole completions on the reward: {used[0]} would weight or cut "
                "that ratio a second time"
            )
        return None

    def _weight_problem(self) -> str | None:
        """Weights by q/μ, and what else reads the same ratio."""
        loss, mode, low, high = (
            self.loss_type,
            self.importance_sampling_mode,
            self.importance_sampling_clip_min,
            self.importance_sampling_clip_max,
        )
        if loss in ("topr", "gepo", "oapl") and self.proximal_policy != "behavior":
            return f"{loss} has its own weight for π/μ: proximal_policy must be 'behavior'"
        if loss == "decoupled_ppo" and (self.proximal_policy == "behavior" or self.weight_mode is None):
            return (
                "decoupled_ppo weights by q/μ and clips π/q: it needs a proximal_policy other than "
                "'behavior' and an importance_sampling_mode; without them it is dapo"
            )
        if mode == "none":
            return (
                None if low is high is None else "importance_sampling_clip_* needs importance_sampling_mode"
            )
        if low is None and high is None:
            return (
                "importance_sampling_mode needs importance_sampling_clip_min or importance_sampling_clip_max"
            )
        if low is not None and high is not None and low >= high:
            return f"importance_sampling_clip_min ({low:g}) must be below importance_sampling_clip_max"
        if self.weight_mode == "truncate" and self.proximal_policy == "behavior":
            return (
                f"importance_sampling_mode '{mode}' would weight by π/μ a second time, {loss} does so "
                "already: set proximal_policy = 'current', so that the loss's own ratio starts at 1, or "
                "take a mask mode"
            )
        if loss in ("topr", "gepo") and mode.startswith("sequence"):
            return f"{loss} bounds π/μ of whole completions itself: '{mode}' would cut the same ratio twice"
        if self.delta is not None and self.proximal_policy == "behavior" and mode == "token_mask" and high:
            return (
                "delta and importance_sampling_clip_max both cut π/μ of a token from above: keep one of them"
            )
        return None

    def _trust_region_problem(self) -> str | None:
        """At most one of those that bound how far π/μ of a token may go."""
        used = [name for name in TRUST_REGIONS if getattr(self, name)]
        unread = [name for name in ("sat_quantile", "delta") if getattr(self, name)]
        if unread and self.proximal_policy == "current":
            return f"{unread[0]} bounds π/q, which is always 1 with proximal_policy 'current'"
        if len(used) > 1:
            return f"{used[0]} and {used[1]} both bound how far π/μ may go: keep one of them"
        if self.sat_quantile is not None and not self.clips:
            return f"sat_quantile narrows the clip range of {_names(CLIP_LOSSES)}; here nothing is clipped"
        if self.clips and used and used[0] != "sat_quantile":
            return (
                f"{used[0]} and epsilon both bound how far π/μ may go: leave out epsilon and epsilon_high "
                "(they are then 1 and 100, which never clip)"
            )
        return None


def _names(losses: frozenset[str]) -> str:
    return ", ".join(name for name in LOSS_DEFAULTS if name in losses)
