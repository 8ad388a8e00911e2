"""Which task a worker gets: derived here a second time with hashlib and msgpack alone."""

import hashlib
import math
from collections import Counter

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.refusals import Refused
from protocol.tasks import TaskSpec, _total_weight, assigned_task, group_seed, held_out_tasks

RUN, NODE, POLICY = b"r" * 32, b"n" * 32, b"p" * 32
HASHES = st.binary(min_size=32, max_size=32)
NUMBERS = st.integers(0, limits.MAX_COUNTER)


def family(name: str, weight: float = 1.0) -> TaskSpec:
    return TaskSpec(environment="env", name=name, config={"size": 3}, weight=weight)


TASKS = [family("a", 1.0), family("b", 2.0), family("c", 0.5)]


def digest(purpose: bytes, *fields: object) -> bytes:
    packed = msgpack.packb(list(fields))
    return hashlib.sha256(b"swarmnode/1 " + purpose + b"\x00" + packed).digest()


@settings(max_examples=50)
@given(HASHES, HASHES, HASHES, NUMBERS, NUMBERS)
def test_assignment_by_an_independent_derivation(
    run: bytes, node: bytes, policy: bytes, version: int, counter: int
) -> None:
    drawn = digest(b"task", run, node, policy, version, counter)
    share = int.from_bytes(drawn[0:6], "big") / 2**48 * 3.5
    name = "a" if share < 1.0 else "b" if share < 3.0 else "c"
    task = assigned_task(TASKS, run, node, policy, version, counter)
    assert task.config_hash == hashlib.sha256(msgpack.packb(["env", name, {"size": 3}])).digest()
    assert task.seed == int.from_bytes(drawn[8:12], "big") & 0x7FFFFFFF
    assert task.environment == "env"
    noise = digest(b"noise", run, node, policy, version, counter)
    assert group_seed(run, node, policy, version, counter) == int.from_bytes(noise[:8], "big")


def test_one_assignment_to_the_last_digit() -> None:
    task = assigned_task(TASKS, RUN, NODE, POLICY, 3, 4)
    assert (task.seed, task.config_hash.hex()[:16]) == (1035055041, "ed23bd3b9c74f01f")
    assert group_seed(RUN, NODE, POLICY, 3, 4) == 17356311030213206099


def test_assignment_and_noise_depend_on_every_input() -> None:
    base = (RUN, NODE, POLICY, 3, 4)
    others = [
        (b"R" * 32, NODE, POLICY, 3, 4),
        (RUN, b"N" * 32, POLICY, 3, 4),
        (RUN, NODE, b"P" * 32, 3, 4),
        (RUN, NODE, POLICY, 4, 4),
        (RUN, NODE, POLICY, 3, 5),
        (RUN, NODE, POLICY, 4, 3),
        (NODE, RUN, POLICY, 3, 4),
    ]
    seeds = {assigned_task(TASKS, *inputs).seed for inputs in [base, *others]}
    noises = {group_seed(*inputs) for inputs in [base, *others]}
    assert len(seeds) == len(noises) == 1 + len(others)


def test_the_task_says_nothing_about_the_noise() -> None:
    assert digest(b"task", RUN)[:8] != digest(b"noise", RUN)[:8]
    assert all(
        assigned_task(TASKS, RUN, NODE, POLICY, 0, counter).seed
        != group_seed(RUN, NODE, POLICY, 0, counter) % 2**31
        for counter in range(50)
    )


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.01, 1.0, 10.0), (5.0,)])
def test_families_are_drawn_by_weight(weights: tuple[float, ...]) -> None:
    families = [family(f"f{index}", weight) for index, weight in enumerate(weights)]
    count = 4000
    drawn = Counter(
        assigned_task(families, RUN, NODE, POLICY, 0, counter).config_hash for counter in range(count)
    )
    for task in families:
        share = task.weight / sum(weights)
        spread = (count * share * (1 - share)) ** 0.5
        assert abs(drawn[task.config_hash] - count * share) <= 5 * spread + 1e-9


def test_seeds_are_spread_over_the_training_range() -> None:
    seeds = [assigned_task(TASKS, RUN, NODE, POLICY, 0, counter).seed for counter in range(4000)]
    assert len(set(seeds)) == len(seeds)
    quarters = Counter(seed // 2**29 for seed in seeds)
    assert all(abs(quarters[quarter] - 1000) < 5 * 750**0.5 for quarter in range(4))


@settings(max_examples=200)
@given(HASHES, HASHES, HASHES, NUMBERS, NUMBERS)
def test_a_held_out_seed_is_never_assigned(
    run: bytes, node: bytes, policy: bytes, version: int, counter: int
) -> None:
    assert 0 <= assigned_task(TASKS, run, node, policy, version, counter).seed < limits.TRAIN_SEED_LIMIT


def test_held_out_tasks_lie_above_every_training_seed_and_are_the_same_for_everyone() -> None:
    refs = held_out_tasks(TASKS, 100)
    assert [ref.seed for ref in refs] == [2**31 + index for index in range(100)]
    assert held_out_tasks(TASKS, 100) == refs
    assert held_out_tasks(TASKS, 40) == refs[:40]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 200))
def test_held_out_families_are_in_proportion_at_every_length(weights: list[float], count: int) -> None:
    families = [family(f"f{index}", weight) for index, weight in enumerate(weights)]
    drawn = Counter(ref.config_hash for ref in held_out_tasks(families, count))
    assert sum(drawn.values()) == count
    for task in families:
        assert abs(drawn[task.config_hash] - count * task.weight / sum(weights)) <= len(families)


def test_weights_add_up_the_same_on_every_python() -> None:
    # Since Python 3.12 the built-in sum compensates rounding; added one by one, the small ones are lost.
    families = [family("a", 1e6), *(family(f"small{index}", 1e-12) for index in range(200))]
    assert _total_weight(families) == 1e6
    assert math.fsum(task.weight for task in families) > 1e6


def test_the_weight_is_no_part_of_what_the_questions_are() -> None:
    assert family("a", 1.0).config_hash == family("a", 9.0).config_hash
    assert len({family("a").config_hash, family("b").config_hash}) == 2
    other = TaskSpec(environment="env2", name="a", config={"size": 3})
    assert other.config_hash != family("a").config_hash
    assert TaskSpec(environment="env", name="a", config={"size": 4}).config_hash != family("a").config_hash


def test_a_configuration_that_has_no_encoding_is_refused() -> None:
    with pytest.raises(Refused):
        TaskSpec(environment="env", name="a", config={"x": float("nan")})
    with pytest.raises(Refused):
        TaskSpec(environment="env", name="a", config={"x": {1: 2}})
