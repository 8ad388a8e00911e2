"""The reasoning_gym task families as an environment: procedural questions, each picked by its seed.

A family generates item `i` from `Random(seed + i)`. Its own seed is 0 here, so a task's seed is the index.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym  # type: ignore[import-untyped]
from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]

from protocol import limits
from protocol.tasks import TaskRef, TaskSpec
from swarmnode.environments.base import Environment, TaskConfigError, UnknownTask

log = logging.getLogger(__name__)

MAX_SCORED_CHARS = 8192
"""Longer completions score 0 unread: no family has such answers, and some scorers are slower than linear."""

ANSWERS_EVALUATED = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Families of reasoning_gym 0.1.25 whose scorer passes the completion to `eval`, or to sympy's `parse_expr`,
which evaluates it: a completion from a peer would be code that runs here. A test looks for new ones."""

NOT_REPRODUCIBLE = frozenset(
    {
        "codeio",
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
    }
)
"""Families whose items differ between processes, because they follow the order of a set: a receiver could not
rebuild the question. Found by comparing 35 items of every family under several values of `PYTHONHASHSEED`."""

OWN_KEYS = frozenset({"seed", "size", "data_file"})
"""Settings that a run may not give: the task's seed stands for two, and `data_file` could name any file."""


class ReasoningGymEnvironment(Environment):
    """The reasoning_gym families of one run. Each data set is built once; recent items are kept."""

    def __init__(self, tasks: Sequence[TaskSpec], partial_credit: bool = False) -> None:
        self._partial_credit = partial_credit
        self._families: dict[bytes, Any] = {}
        for task in tasks:
            if task.config_hash not in self._families:
                self._families[task.config_hash] = _family(task)
        self._item = lru_cache(maxsize=512)(self._generate)

    def question(self, task: TaskRef) -> str:
        return str(self._item(task.environment, task.config_hash, task.seed)["question"])

    def score(self, task: TaskRef, completion: str) -> float:
        item = self._item(task.environment, task.config_hash, task.seed)
        if len(completion) > MAX_SCORED_CHARS:
            return 0.0
        try:
            raw = float(self._families[task.config_hash].score_answer(completion.strip(), item))
        except Exception as error:
            # The family parses whatever a peer sent; what its parser chokes on is not a right answer.
            log.debug("scorer failed on a completion of %d characters: %r", len(completion), error)
            return 0.0
        if raw >= 1.0:
            return 1.0
        # Not a number compares false with everything, and so scores 0 as well.
        return raw if self._partial_credit and raw > 0.0 else 0.0

    def answer(self, task: TaskRef) -> str:
        """The family's own answer, to make examples of. Raises `UnknownTask`."""
        return str(self._item(task.environment, task.config_hash, task.seed)["answer"])

    def _generate(self, environment: str, config_hash: bytes, seed: int) -> dict[str, Any]:
        family = self._families.get(config_hash)
        if environment != "reasoning_gym" or family is None:
            raise UnknownTask(f"no task family of this run has the config hash {config_hash.hex()[:16]}")
        item: dict[str, Any] = family[seed]
        return item


def _family(task: TaskSpec) -> Any:
    """The data set of a family, if its answers are safe to score and every seed gives a question."""
    if task.name not in DATASETS:
        raise TaskConfigError(
            f"reasoning_gym has no task family {task.name!r}: see `reasoning_gym.factory.DATASETS`"
        )
    if task.name in ANSWERS_EVALUATED:
        raise TaskConfigError(
            f"the task family {task.name!r} evaluates answers as code, and they come from the network: "
            "choose another family"
        )
    if task.name in NOT_REPRODUCIBLE:
        raise TaskConfigError(
            f"the task family {task.name!r} gives every process another question for a seed: "
            "choose another family"
        )
    refused = sorted(OWN_KEYS & task.config.keys())
    if refused:
        raise TaskConfigError(f"task family {task.name!r}: remove {', '.join(refused)} from its config")
    try:
        family = reasoning_gym.create_dataset(task.name, seed=0, size=1, **task.config)
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskConfigError(
            f"task family {task.name!r} refuses its config {task.config}: {error}"
        ) from error
    for seed in (1, limits.TRAIN_SEED_LIMIT - 1, limits.HELD_OUT_SEED_LIMIT - 1):
        try:
            family[seed]
        except Exception as error:
            raise TaskConfigError(
                f"task family {task.name!r}, config {task.config}, has no question for seed {seed}: {error!r}"
            ) from error
    return family
