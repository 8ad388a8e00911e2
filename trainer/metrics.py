"""What an update measured, over all its tokens and by the age of the version that made them.

Ages are put into buckets 0, 1, 2, 3–4, 5–8, 9–16, … named by their last. Means are over the tokens of local
groups; entropy, clipped and masked shares are over those of external groups as well.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LARGEST_BUCKET = 14
"""Index of the last bucket, which ends at 2^13 versions and holds everything older."""

SUMS = (
    "tokens",
    "entropy",
    "ratio",
    "ratio_squared",
    "log_ratio_squared",
    "kl",
    "clipped",
    "masked",
    "base_kl",
)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenReport:
    """N tokens of one micro-batch, and its B completions. `log_ratio` is log π/μ."""

    lags_N: npt.NDArray[np.int64]
    is_local_N: npt.NDArray[np.bool_]
    entropy_N: Array
    log_ratio_N: Array
    clipped_N: Array
    masked_N: Array
    base_kl_N: Array
    row_lags_B: npt.NDArray[np.int64]
    row_is_local_B: npt.NDArray[np.bool_]
    row_log_ratio_B: Array
    """Sum over each completion's tokens."""


@dataclass
class UpdateMetrics:
    """Sums of one update. `add` takes micro-batches in any order."""

    loss: float = 0.0
    _local: Array = field(default_factory=lambda: np.zeros((LARGEST_BUCKET + 1, len(SUMS))))
    _external: Array = field(default_factory=lambda: np.zeros(len(SUMS)))
    _largest_ratio: Array = field(default_factory=lambda: np.zeros(LARGEST_BUCKET + 1))
    _rows: list[tuple[int, float]] = field(default_factory=list)

    def add(self, report: TokenReport, loss: float) -> None:
        """Count one micro-batch; `loss` is its share of the update's."""
        self.loss += loss
        ratio_N = np.exp(report.log_ratio_N)
        table = np.stack(
            [
                np.ones_like(ratio_N),
                report.entropy_N,
                ratio_N,
                ratio_N**2,
                report.log_ratio_N**2,
                ratio_N - 1.0 - report.log_ratio_N,
                report.clipped_N,
                report.masked_N,
                report.base_kl_N,
            ],
            axis=1,
        )
        local = report.is_local_N
        buckets = bucket_of(report.lags_N[local])
        np.add.at(self._local, buckets, table[local])
        np.maximum.at(self._largest_ratio, buckets, ratio_N[local])
        self._external += table[~local].sum(axis=0)
        rows = report.row_is_local_B
        self._rows += zip(
            bucket_of(report.row_lags_B[rows]).tolist(), report.row_log_ratio_B[rows].tolist(), strict=True
        )

    @property
    def ess_ratio(self) -> float:
        """Effective share of the local completions under their untruncated weights Π π/μ; 1 when there are
        none."""
        return effective_share(np.asarray([log_weight for _, log_weight in self._rows]))

    def totals(self) -> dict[str, float]:
        """Figures of the whole update."""
        local = dict(zip(SUMS, self._local.sum(axis=0).tolist(), strict=True))
        every = dict(zip(SUMS, (self._local.sum(axis=0) + self._external).tolist(), strict=True))
        figures = _figures(local, float(self._largest_ratio.max()))
        tokens = max(every["tokens"], 1.0)
        return {
            **figures,
            "loss": self.loss,
            "tokens": every["tokens"],
            "entropy": every["entropy"] / tokens,
            "clip_fraction": every["clipped"] / tokens,
            "mask_fraction": every["masked"] / tokens,
            "base_kl": every["base_kl"] / tokens,
            "ess_ratio": self.ess_ratio,
        }

    def by_age(self) -> dict[int, dict[str, float]]:
        """The same figures of local tokens per bucket, named by its largest lag; empty buckets are left
        out."""
        result = {}
        for bucket in np.flatnonzero(self._local[:, 0]).tolist():
            sums = dict(zip(SUMS, self._local[bucket].tolist(), strict=True))
            tokens = sums["tokens"]
            weights = np.asarray([log_weight for other, log_weight in self._rows if other == bucket])
            result[bucket_end(bucket)] = {
                **_figures(sums, float(self._largest_ratio[bucket])),
                "tokens": tokens,
                "entropy": sums["entropy"] / tokens,
                "clip_fraction": sums["clipped"] / tokens,
                "mask_fraction": sums["masked"] / tokens,
                "ess_ratio": effective_share(weights),
            }
        return result


def _figures(sums: dict[str, float], largest_ratio: float) -> dict[str, float]:
    """What is known of the ratios of some tokens; that they are on policy when there are none."""
    tokens = sums["tokens"]
    if not tokens:
        return {
            **{"ratio_mean": 1.0, "ratio_max": 1.0, "ratio_variance": 0.0, "logratio_rms": 0.0, "kl": 0.0},
            "token_ess_ratio": 1.0,
        }
    return {
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": largest_ratio,
        "ratio_variance": (sums["ratio_squared"] - 2.0 * sums["ratio"]) / tokens + 1.0,
        "logratio_rms": float(np.sqrt(sums["log_ratio_squared"] / tokens)),
        "kl": sums["kl"] / tokens,
        "token_ess_ratio": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
    }


def effective_share(log_weights: Array) -> float:
    """(Σ w)² / (N · Σ w²) of N weights: the share of the samples that a weighted mean really uses."""
    if not len(log_weights):
        return 1.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def bucket_of(lags: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Index of each lag's bucket: 0, 1, 2, then 2 + k for lags up to 2^(k+1)."""
    small = np.clip(lags, 0, 2)
    large = np.ceil(np.log2(np.maximum(lags, 1))).astype(np.int64) + 1
    return np.minimum(np.where(lags <= 2, small, large), LARGEST_BUCKET)


def bucket_end(bucket: int) -> int:
    """The largest lag of a bucket."""
    return bucket if bucket <= 2 else int(2 ** (bucket - 1))
