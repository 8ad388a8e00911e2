"""Figures of an update: exact values over all tokens and by age, in whatever order micro-batches come."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import (
    LARGEST_BUCKET,
    TokenReport,
    UpdateMetrics,
    bucket_end,
    bucket_of,
    effective_share,
)


def report(
    lags: list[int], ratios: list[float], *, local: list[bool] | None = None, rows: int = 1
) -> TokenReport:
    """Tokens with entropy 0.5; the first is clipped, the last masked. Completions of equal length."""
    count = len(lags)
    length = count // rows
    is_local = np.array(local or [True] * count)
    log_ratios = np.log(np.array(ratios))
    return TokenReport(
        lags_N=np.array(lags),
        is_local_N=is_local,
        entropy_N=np.full(count, 0.5),
        log_ratio_N=log_ratios,
        clipped_N=np.eye(count)[0],
        masked_N=np.eye(count)[-1],
        base_kl_N=np.full(count, 0.25),
        row_lags_B=np.array(lags).reshape(rows, length).max(1),
        row_is_local_B=is_local.reshape(rows, length)[:, 0],
        row_log_ratio_B=log_ratios.reshape(rows, length).sum(1),
    )


def test_buckets_are_single_lags_then_powers_of_two() -> None:
    lags = np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 10_000])
    ends = [bucket_end(int(bucket)) for bucket in bucket_of(lags)]
    assert ends == [0, 1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 8192]


@given(st.integers(0, 10**6))
def test_a_lag_lies_in_its_bucket(lag: int) -> None:
    bucket = int(bucket_of(np.array([lag]))[0])
    if bucket < LARGEST_BUCKET:
        assert lag <= bucket_end(bucket)
    assert bucket == 0 or lag > bucket_end(bucket - 1)


def test_figures_of_all_tokens_and_of_each_age() -> None:
    metrics = UpdateMetrics()
    metrics.add(report([0, 0, 3, 4], [1.0, 1.0, 2.0, 0.5], rows=2), loss=0.75)
    metrics.add(report([5, 5], [4.0, 1.0], local=[False, False]), loss=0.25)
    total, ages = metrics.totals(), metrics.by_age()
    assert (total["loss"], total["tokens"]) == (1.0, 6.0)
    # Ratios are of local tokens; clipped, masked and entropy of all.
    assert total["ratio_mean"] == pytest.approx(4.5 / 4) and total["ratio_max"] == pytest.approx(2.0)
    assert total["ratio_variance"] == pytest.approx((1.0 + 0.25) / 4)
    assert total["logratio_rms"] == pytest.approx(math.log(2) / math.sqrt(2))
    assert total["kl"] == pytest.approx((2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 4)
    assert total["token_ess_ratio"] == pytest.approx(4.5**2 / (4 * 6.25))
    assert (total["clip_fraction"], total["mask_fraction"]) == (pytest.approx(2 / 6), pytest.approx(2 / 6))
    assert (total["entropy"], total["base_kl"]) == (pytest.approx(0.5), pytest.approx(0.25))
    # Two local completions, both with the product 1.
    assert total["ess_ratio"] == pytest.approx(1.0)
    assert list(ages) == [0, 4]
    assert ages[0]["tokens"] == ages[4]["tokens"] == 2.0
    assert (ages[0]["clip_fraction"], ages[4]["mask_fraction"]) == (0.5, 0.5)
    assert (ages[0]["ratio_mean"], ages[4]["ratio_mean"]) == (pytest.approx(1.0), pytest.approx(1.25))
    assert (ages[0]["kl"], ages[4]["kl"]) == (pytest.approx(0.0), pytest.approx(0.25))


def test_an_update_without_tokens_looks_like_one_on_policy() -> None:
    total = UpdateMetrics().totals()
    assert total["ratio_mean"] == total["token_ess_ratio"] == total["ess_ratio"] == 1.0
    assert total["tokens"] == total["kl"] == total["entropy"] == 0.0
    assert UpdateMetrics().by_age() == {}


def test_the_order_and_cut_of_micro_batches_change_nothing() -> None:
    one, other = UpdateMetrics(), UpdateMetrics()
    parts = [report([lag, lag], [1.0 + lag, 1.0]) for lag in (0, 1, 7)]
    for part in parts:
        one.add(part, loss=0.1)
    for part in reversed(parts):
        other.add(part, loss=0.1)
    assert one.totals() == pytest.approx(other.totals())
    assert {age: pytest.approx(figures) for age, figures in one.by_age().items()} == other.by_age()


def test_the_effective_share_of_equal_weights_is_all_and_of_one_heavy_weight_one() -> None:
    assert effective_share(np.full(8, -300.0)) == pytest.approx(1.0)
    assert effective_share(np.array([0.0, -80.0, -90.0, -99.0])) == pytest.approx(0.25)
    assert effective_share(np.log([1.0, 3.0])) == pytest.approx(16 / (2 * 10))
    assert effective_share(np.array([])) == 1.0


@pytest.mark.parametrize(("sigma", "share"), [(0.3, 0.914), (0.7, 0.613), (1.0, 0.368), (1.5, 0.105)])
def test_log_normal_weights_have_the_share_that_theory_says(sigma: float, share: float) -> None:
    weights = np.random.default_rng(0).normal(0, sigma, 200_000)
    assert effective_share(weights) == pytest.approx(math.exp(-(sigma**2)), rel=0.05)
    assert math.exp(-(sigma**2)) == pytest.approx(share, abs=5e-4)
