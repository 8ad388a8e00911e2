"""Sampling noise: Philox against its authors' answers, the logarithm against float64, Gumbel to theory."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.noise import exact_log, gumbel_noise, philox, random_bits

SEED = 0x0123456789ABCDEF


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    words = [np.array([word], dtype=np.uint64) for word in counter]
    c0, c1, c2, c3 = philox((words[0], words[1], words[2], words[3]), (key[0], key[1]))
    return [int(word[0]) for word in (c0, c1, c2, c3)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox4x32_10_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    def numbers(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    assert philox_words(numbers(counter), numbers(key)) == numbers(expected)


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same ten rounds on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


WORDS = st.integers(0, 2**32 - 1)


@settings(max_examples=50)
@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=2, max_size=2))
def test_philox_on_arrays_is_philox_on_integers(counter: list[int], key: list[int]) -> None:
    assert philox_words(counter, key) == reference_philox(counter, key)


def test_each_token_has_its_own_word_of_its_own_block() -> None:
    bits = random_bits(SEED, completion=3, position=17, vocabulary_size=11)
    assert bits.shape == (11,)
    for token, word in enumerate(bits):
        block = reference_philox([token // 4, 17, 3, 0], [SEED & 0xFFFFFFFF, SEED >> 32])
        assert int(word) == block[token % 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 101])
def test_the_vocabulary_size_only_cuts(size: int) -> None:
    assert np.array_equal(gumbel_noise(SEED, 1, 2, size), gumbel_noise(SEED, 1, 2, 1000)[:size])
    assert gumbel_noise(SEED, 1, 2, size).dtype == np.float32


def some_uniforms() -> npt.NDArray[np.float32]:
    """The numbers that the noise starts from, (k + 0.5) / 2^23: every seventh, and all near 0 and 1."""
    edge = 2**14
    steps = np.concatenate(
        [np.arange(edge), np.arange(edge, 2**23 - edge, 7), np.arange(2**23 - edge, 2**23)]
    )
    return (steps.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


@pytest.fixture(scope="module")
def first_log() -> npt.NDArray[np.float32]:
    return -exact_log(some_uniforms())


def relative_error(values: npt.NDArray[np.float32], exact: npt.NDArray[np.float64]) -> float:
    return float(np.max(np.abs(values.astype(np.float64) - exact) / np.abs(exact)))


def test_a_uniform_is_exact_and_inside_zero_and_one() -> None:
    uniforms = some_uniforms()
    steps = uniforms.astype(np.float64) * 2**23 - 0.5
    assert np.array_equal(steps, np.floor(steps))
    assert (uniforms.min(), uniforms.max()) == (2.0**-24, 1 - 2.0**-24)


def test_the_log_of_a_uniform_is_close(first_log: npt.NDArray[np.float32]) -> None:
    assert relative_error(first_log, -np.log(some_uniforms().astype(np.float64))) < 1e-7
    assert first_log.min() > 0


def test_the_log_of_that_log_is_close_and_the_noise_is_finite_and_ascends(
    first_log: npt.NDArray[np.float32],
) -> None:
    noise = -exact_log(first_log)
    exact = -np.log(first_log.astype(np.float64))
    assert float(np.max(np.abs(noise.astype(np.float64) - exact) / np.maximum(np.abs(exact), 1e-6))) < 1e-7
    assert np.isfinite(noise).all()
    assert float(noise.max()) == pytest.approx(math.log(2**24), abs=1e-5)
    assert float(noise.min()) == pytest.approx(-math.log(math.log(2**24)), abs=1e-6)
    assert np.all(np.diff(noise) >= 0)


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_the_log_of_any_normal_number_is_close(value: float) -> None:
    result = float(exact_log(np.array([value], dtype=np.float32))[0])
    exact = math.log(value)
    assert abs(result - exact) <= 1e-7 * abs(exact)


def documented_log(value: np.float32) -> np.float32:
    """The steps of docs/protocol.md, section 6, one rounded operation at a time."""
    f = np.float32
    word = int(value.view(np.uint32))
    exponent = (word >> 23) - 126
    m = np.uint32((word & 0x7FFFFF) | 126 << 23).view(np.float32)
    if m < f(0.70710677):
        exponent, x = exponent - 1, f(f(m + m) - f(1))
    else:
        x = f(m - f(1))
    s, p, e = f(x * x), f(7.0376836292e-2), f(exponent)
    for coefficient in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1):
        p = f(f(p * x) + f(coefficient))
    for coefficient in (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = f(f(p * x) + f(coefficient))
    y = f(f(p * x) * s)
    y = f(y + f(e * f(-2.12194440e-4)))
    y = f(y - f(f(0.5) * s))
    return f(f(x + y) + f(e * f(0.693359375)))


@settings(max_examples=200)
@given(st.integers(0, 2**23 - 1))
def test_the_noise_follows_the_documented_steps_to_the_last_bit(top: int) -> None:
    uniform = np.float32((top + 0.5) / 2**23)
    first = -documented_log(uniform)
    assert exact_log(np.array([uniform]))[0].tobytes() == (-first).tobytes()
    assert exact_log(np.array([first]))[0].tobytes() == documented_log(first).tobytes()


def test_exact_values_of_the_log() -> None:
    values = np.array([1.0, 2.0, 0.5, 4.0], dtype=np.float32)
    assert exact_log(values)[0] == 0
    assert exact_log(values)[1:].tolist() == [
        float(np.float32(math.log(2))),
        float(np.float32(-math.log(2))),
        float(np.float32(math.log(4))),
    ]


def gumbel_distance(sample: npt.NDArray[np.float64]) -> float:
    """Kolmogorov–Smirnov distance from the standard Gumbel distribution, times sqrt(n)."""
    count = len(sample)
    cumulative = np.exp(-np.exp(-np.sort(sample)))
    steps = np.arange(count + 1) / count
    distance = max(np.max(steps[1:] - cumulative), np.max(cumulative - steps[:-1]))
    return float(distance * math.sqrt(count))


@pytest.mark.parametrize(
    "sample",
    [
        lambda: gumbel_noise(SEED, 0, 0, 100_000),
        lambda: np.array([gumbel_noise(SEED, 0, position, 5)[2] for position in range(2500)]),
        lambda: np.array([gumbel_noise(SEED, completion, 9, 5)[4] for completion in range(2500)]),
        lambda: np.array([gumbel_noise(seed, 0, 0, 5)[1] for seed in range(2500)]),
        lambda: np.array([gumbel_noise(seed << 32, 0, 0, 5)[1] for seed in range(2500)]),
    ],
    ids=["tokens", "positions", "completions", "seeds-low", "seeds-high"],
)
def test_the_noise_is_standard_gumbel_along_every_axis(sample: object) -> None:
    values = sample().astype(np.float64)  # type: ignore[operator]
    count = len(values)
    assert (
        gumbel_distance(values) < 1.95
    )  # exceeded once in a thousand by chance; nothing here is left to chance
    assert abs(values.mean() - 0.5772156649) < 4 * (math.pi / math.sqrt(6)) / math.sqrt(count)
    assert abs(values.var() - math.pi**2 / 6) < 4 * math.pi**2 / 6 * math.sqrt(4.4 / count)


def test_neighbours_on_every_axis_are_uncorrelated() -> None:
    base = gumbel_noise(SEED, 4, 7, 50_000)
    others = [
        np.roll(base, 1),
        gumbel_noise(SEED, 4, 8, 50_000),
        gumbel_noise(SEED, 5, 7, 50_000),
        gumbel_noise(SEED, 7, 4, 50_000),
        gumbel_noise(SEED + 1, 4, 7, 50_000),
        gumbel_noise(SEED ^ 1 << 63, 4, 7, 50_000),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(50_000)


def test_sampling_by_the_noise_is_sampling_from_the_softmax() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = np.log(probabilities).astype(np.float32)
    count = 6000
    tokens = [int(np.argmax(logits + gumbel_noise(SEED, 0, position, 5))) for position in range(count)]
    drawn = np.bincount(tokens, minlength=5)
    chi_square = float(np.sum((drawn - count * probabilities) ** 2 / (count * probabilities)))
    assert chi_square < 18.5  # one in a thousand for four degrees of freedom
