"""Environments: where questions and rewards come from. `build_environment` makes the one of a run.

Nothing here imports torch, and the libraries that generate tasks are imported only when a run uses them.
"""

from collections.abc import Callable, Sequence

from protocol.tasks import TaskRef, TaskSpec
from swarmnode.environments.base import Environment, TaskConfigError, UnknownTask


def _reasoning_gym(tasks: Sequence[TaskSpec], partial_credit: bool) -> Environment:
    from swarmnode.environments.reasoning_gym import ReasoningGymEnvironment

    return ReasoningGymEnvironment(tasks, partial_credit=partial_credit)


ENVIRONMENTS: dict[str, Callable[[Sequence[TaskSpec], bool], Environment]] = {
    "reasoning_gym": _reasoning_gym,
}


class _ByName(Environment):
    """Hands each task to the environment that its reference names."""

    def __init__(self, environments: dict[str, Environment]) -> None:
        self._environments = environments

    def _of(self, task: TaskRef) -> Environment:
        environment = self._environments.get(task.environment)
        if environment is None:
            raise UnknownTask(f"environment {task.environment!r} is not one of this run's")
        return environment

    def question(self, task: TaskRef) -> str:
        return self._of(task).question(task)

    def score(self, task: TaskRef, completion: str) -> float:
        return self._of(task).score(task, completion)


def build_environment(tasks: Sequence[TaskSpec], partial_credit: bool = False) -> Environment:
    """The environment of a run with these families. Raises `TaskConfigError` for one that cannot be used.

    `partial_credit`: keep the fractions that a family's own scorer gives to nearly right answers. Off by
    default, because many of them reward noise around an answer, or an answer of the right shape.
    """
    if not tasks:
        raise TaskConfigError("a run needs at least one task family: add one under [[tasks]]")
    environments: dict[str, Environment] = {}
    for name in sorted({task.environment for task in tasks}):
        if name not in ENVIRONMENTS:
            raise TaskConfigError(f"unknown environment {name!r}: choose one of {', '.join(ENVIRONMENTS)}")
        own = [task for task in tasks if task.environment == name]
        environments[name] = ENVIRONMENTS[name](own, partial_credit)
    return _ByName(environments)


__all__ = ["ENVIRONMENTS", "Environment", "TaskConfigError", "UnknownTask", "build_environment"]
