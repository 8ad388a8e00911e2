"""Seeded Gumbel noise: the same numbers on every device, for any (group seed, completion, position, token).

Philox4x32-10 (Salmon et al., 2011) makes 32 random bits per token: key = the group seed's low and high words,
counter = (token // 4, position, completion, 0), lane = token % 4. The top 23 bits become a uniform number u =
(bits + 0.5) / 2^23, exact in float32, and the noise is -log(-log(u)) with `log` evaluated by a fixed sequence
of float32 additions and multiplications. Each is correctly rounded by IEEE 754, so NumPy, PyTorch on a CPU
and PyTorch on a GPU agree to the last bit, as long as no compiler fuses a multiplication with an addition.
Largest value: 16.64.
"""

import numpy as np
import numpy.typing as npt

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

LN2_HIGH = float(np.float32(0.693359375))
"""High part of ln 2: exact products with exponents up to 2^8."""
LN2_LOW = float(np.float32(-2.12194440e-4))
LOG_COEFFICIENTS = tuple(
    float(np.float32(value))
    for value in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
"""Cephes' single-precision polynomial of log(1 + x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power first."""

Words = npt.NDArray[np.uint64]


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox4x32 on arrays of 32-bit words held in uint64."""
    low_mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0 = np.uint64(PHILOX_MULTIPLIERS[0]) * c0
        product1 = np.uint64(PHILOX_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(k0),
            product1 & low_mask,
            (product0 >> shift) ^ c3 ^ np.uint64(k1),
            product0 & low_mask,
        )
        k0, k1 = (k0 + PHILOX_WEYL[0]) & 0xFFFFFFFF, (k1 + PHILOX_WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(group_seed: int, completion: int, position: int, vocabulary_size: int) -> Words:
    """32 random bits per token id, as uint64 of shape [vocabulary_size]."""
    blocks = np.arange(-(-vocabulary_size // 4), dtype=np.uint64)
    counter = (
        blocks,
        np.full_like(blocks, position),
        np.full_like(blocks, completion),
        np.zeros_like(blocks),
    )
    words = philox(counter, (group_seed & 0xFFFFFFFF, group_seed >> 32))
    return np.stack(words, axis=-1).reshape(-1)[:vocabulary_size]


def exact_log(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Natural logarithm of positive normal float32 by exactly rounded operations only (error below 1e-7
    relative)."""
    bits = values.view(np.int32)
    # Split into exponent and a mantissa in [sqrt(1/2), sqrt(2)).
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)
    small = mantissa < np.float32(0.70710677)
    exponent = (exponent - small).astype(np.float32)
    x = np.where(small, mantissa + mantissa, mantissa) - np.float32(1.0)
    square = x * x
    polynomial = np.full_like(x, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        polynomial = polynomial * x
        polynomial = polynomial + np.float32(coefficient)
    y = polynomial * x
    y = y * square
    y = y + exponent * np.float32(LN2_LOW)
    y = y - np.float32(0.5) * square
    result = x + y
    return np.asarray(result + exponent * np.float32(LN2_HIGH), dtype=np.float32)


def gumbel_noise(
    group_seed: int, completion: int, position: int, vocabulary_size: int
) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of every token id at one position of one completion: float32 [vocabulary_size].

    `group_seed` is 64 bits (`protocol.tasks.group_seed`); `completion` the index in the group; `position`
    counts generated tokens from 0.
    """
    bits = random_bits(group_seed, completion, position, vocabulary_size)
    uniform = ((bits >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -exact_log(-exact_log(uniform))
