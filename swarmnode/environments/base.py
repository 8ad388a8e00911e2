"""What every environment can do: rebuild a question from its task reference, and score a completion of it."""

from abc import ABC, abstractmethod

from protocol.tasks import TaskRef


class TaskConfigError(ValueError):
    """A task family of the run cannot be used: unknown, badly configured, or not safe to score."""


class UnknownTask(LookupError):
    """A task reference that names no family of this run."""


class Environment(ABC):
    """Questions and their scores: pure functions of the run's task families, the task reference and the text.

    Every node rebuilds questions for itself and must get the same ones, so an environment holds no state that
    a call could change, and uses no clock and no global random numbers.
    """

    @abstractmethod
    def question(self, task: TaskRef) -> str:
        """The text of the question. Raises `UnknownTask`."""

    @abstractmethod
    def score(self, task: TaskRef, completion: str) -> float:
        """The reward of a completion, in [0, 1]. Takes any text; raises only `UnknownTask`."""
