"""The torch noise is the protocol's, bit by bit, and sampling with it draws from the softmax."""

import numpy as np
import pytest
import torch

from protocol.noise import gumbel_noise
from swarmnode.engines.gumbel_torch import noise_rows, sample_rows, signed_seed

ROWS = [
    (0, 0, 0),
    (2**64 - 1, 63, 32_767),
    (2**63, 1, 1),
    (0x0123456789ABCDEF, 7, 12),
    (2**32 - 1, 2**31, 3),
]
"""(group seed, completion, position), the ends of every range among them."""


def columns(rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seeds, completions, positions = zip(*rows, strict=True)
    return torch.tensor([signed_seed(s) for s in seeds]), torch.tensor(completions), torch.tensor(positions)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 5, 100, 101, 4099, 49_152, 151_937])
def test_noise_has_the_bits_of_the_protocol(vocabulary: int) -> None:
    noise = noise_rows(*columns(ROWS), vocabulary).numpy()
    for row, (seed, completion, position) in zip(noise, ROWS, strict=True):
        expected = gumbel_noise(seed, completion, position, vocabulary)
        assert (row.view(np.int32) == expected.view(np.int32)).all()


@pytest.mark.parametrize("vocabulary", [1, 7, 100, 4099, 49_153])
@pytest.mark.parametrize("spread", [0.0, 3.0, 300.0])
def test_sampled_is_the_argmax_under_the_exact_noise(vocabulary: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = spread * torch.randn(40, vocabulary, generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    completions, positions = torch.arange(40) % 8, torch.arange(40)
    noisy = scores + noise_rows(seeds, completions, positions, vocabulary)
    assert sample_rows(scores, seeds, completions, positions).tolist() == noisy.argmax(dim=1).tolist()


def test_nearly_equal_candidates_are_decided_by_the_exact_noise() -> None:
    """Scores that undo the noise leave all tokens within rounding of each other: the hardest case."""
    columns_of = torch.arange(64), torch.arange(64) % 8, torch.arange(64)
    noise = noise_rows(*columns_of, 257)
    scores = -noise + 1e-6 * torch.randn(64, 257, generator=torch.Generator().manual_seed(1))
    expected = (scores + noise).numpy().argmax(axis=1)  # numpy takes the first among equals
    assert sample_rows(scores, *columns_of).tolist() == expected.tolist()


def test_forbidden_tokens_are_never_sampled() -> None:
    scores = torch.full((256, 9), -torch.inf)
    scores[:, 4] = -50.0
    zeros = torch.zeros(256, dtype=torch.int64)
    assert sample_rows(scores, torch.arange(256), zeros, zeros).eq(4).all()


@pytest.mark.parametrize("varied", ["group", "completion", "position"])
def test_samples_follow_the_softmax(varied: str) -> None:
    """Chi-square with 6 degrees of freedom; 27.86 is exceeded once in 10,000. The seeds are fixed."""
    count = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    fixed, counting = torch.full((count,), 12_345), torch.arange(count)
    tokens = sample_rows(
        logits.expand(count, -1),
        counting * 7_919 if varied == "group" else fixed,
        counting if varied == "completion" else fixed,
        counting if varied == "position" else fixed,
    )
    seen = np.bincount(tokens.numpy(), minlength=7)
    weights = np.exp([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    expected = count * weights / weights.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 27.86


@pytest.mark.parametrize("other", [(1, 0, 0), (2**32, 0, 0), (2**63, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_noise_of_different_rows_is_uncorrelated(other: tuple[int, int, int]) -> None:
    count = 40_000
    first, second = noise_rows(*columns([(0, 0, 0), other]), count).numpy()
    # The correlation of independent rows has a standard deviation of 1 / sqrt(count) = 0.005.
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02
