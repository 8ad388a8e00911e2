"""`protocol.noise` in torch, for many rows at once: the same bits on any device, and the argmax of them.

Words of 32 bits are held in int64. A product of two of them wraps, which leaves its 64 bits as they should
be; the high half is then masked, because `>>` copies the sign. Float operations are the same single
additions and multiplications in the same order, never one that a kernel could fuse (`addcmul`, `alpha=`).
"""

import math

import torch

from protocol.noise import (
    LN2_HIGH,
    LN2_LOW,
    LOG_COEFFICIENTS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
)

MASK = 0xFFFFFFFF
CHUNK_ELEMENTS = 1 << 17
"""Token ids handled at once on a CPU: about ten such arrays then fit into the second-level cache."""

APPROXIMATION_MARGIN = 1e-3
"""Far above what a device's own `log` and the rounding of the sum can move a noisy logit (about 1e-5)."""


def noise_rows(
    group_seeds: torch.Tensor, completions: torch.Tensor, positions: torch.Tensor, vocabulary_size: int
) -> torch.Tensor:
    """Gumbel noise, float32 [rows, vocabulary_size], the bits of `protocol.noise.gumbel_noise`.

    Arguments are int64 [rows] on the device to compute on; seeds of 64 bits as `signed_seed` gives them.
    """
    noise = torch.empty(len(group_seeds), vocabulary_size, dtype=torch.float32, device=group_seeds.device)
    for start, end in _chunks(len(group_seeds), vocabulary_size, group_seeds.device):
        rows = slice(start, end)
        bits = _random_bits(group_seeds[rows], completions[rows], positions[rows], vocabulary_size)
        noise[rows] = _gumbel(bits)
    return noise


def sample_rows(
    scores: torch.Tensor, group_seeds: torch.Tensor, completions: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """argmax(scores + noise) of each row, int64 [rows]; `scores` is float32 [rows, vocabulary].

    Exactly the argmax under `noise_rows` (the lowest id among equals). The exact logarithm is slow, so it is
    computed only for the few ids that the device's own one leaves within `APPROXIMATION_MARGIN` of the best.
    """
    tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    for start, end in _chunks(len(scores), scores.shape[1], scores.device):
        rows = slice(start, end)
        bits = _random_bits(group_seeds[rows], completions[rows], positions[rows], scores.shape[1])
        tokens[rows] = _best(scores[rows], bits)
    return tokens


def signed_seed(group_seed: int) -> int:
    """An unsigned 64-bit seed as the int64 of the same bits."""
    return group_seed - (1 << 64) if group_seed >= 1 << 63 else group_seed


def _chunks(rows: int, vocabulary_size: int, device: torch.device) -> list[tuple[int, int]]:
    """Row ranges that bound the working set: in cache on a CPU, a few hundred MB elsewhere."""
    elements = CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS * 128
    step = max(1, elements // vocabulary_size)
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def _random_bits(
    group_seeds: torch.Tensor, completions: torch.Tensor, positions: torch.Tensor, vocabulary_size: int
) -> torch.Tensor:
    """The top 23 of the 32 random bits per token id, int32 [rows, vocabulary_size]."""
    rows, blocks = len(group_seeds), -(-vocabulary_size // 4)
    # Philox4x32. Words that do not depend on the block (or on the row) yet stay [rows, 1] (or [1, blocks]).
    c0 = torch.arange(blocks, device=group_seeds.device)[None, :]
    c1, c2 = positions[:, None], completions[:, None]
    c3 = torch.zeros(1, 1, dtype=torch.int64, device=group_seeds.device)
    k0, k1 = (group_seeds & MASK)[:, None], ((group_seeds >> 32) & MASK)[:, None]
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0).bitwise_and_(MASK)
        c2 = ((product0 >> 32) ^ c3 ^ k1).bitwise_and_(MASK)
        c1, c3 = product1, product0  # their high halves are masked when the low ones are used
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK, (k1 + PHILOX_WEYL[1]) & MASK
    bits = torch.empty(rows, blocks, 4, dtype=torch.int32, device=group_seeds.device)
    for lane, word in enumerate((c0, c1, c2, c3)):
        bits[:, :, lane] = (word & MASK) >> 9
    return bits.view(rows, blocks * 4)[:, :vocabulary_size]


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def _exact_log(values: torch.Tensor) -> torch.Tensor:
    """`protocol.noise.exact_log`: positive normal float32, exactly rounded operations only."""
    bits = values.view(torch.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = mantissa < 0.70710677
    exponent = ((bits >> 23) - 126 - small.to(torch.int32)).to(torch.float32)
    x = torch.where(small, mantissa + mantissa, mantissa) - 1.0
    square = x * x
    y = torch.full_like(x, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        y.mul_(x).add_(coefficient)
    y.mul_(x).mul_(square)
    y.add_(exponent * LN2_LOW)
    y.sub_(square * 0.5)
    return (x + y).add_(exponent * LN2_HIGH)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    return _exact_log(_exact_log(_uniform(bits).contiguous()).neg_()).neg_()


def _best(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    noisy = scores - _uniform(bits).log_().neg_().log_()
    best = noisy.amax(dim=1, keepdim=True)
    margin = APPROXIMATION_MARGIN + 1e-6 * best.abs()
    rows, ids = (noisy >= best - margin).nonzero(as_tuple=True)
    if len(rows) == len(scores):
        return ids
    exact = scores[rows, ids] + _gumbel(bits[rows, ids])
    # Few candidates remain: one column per candidate of a row, the others at minus infinity.
    first = torch.searchsorted(rows, torch.arange(len(scores), device=rows.device))
    place = torch.arange(len(rows), device=rows.device) - first[rows]
    width = int(place.max()) + 1
    table = torch.full((len(scores), width), -math.inf, device=rows.device)
    table[rows, place] = exact
    winner = (table == table.amax(dim=1, keepdim=True)).to(torch.int8).argmax(dim=1)
    return ids[first + winner]
