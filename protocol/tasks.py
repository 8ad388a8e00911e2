"""Which prompt a worker must answer: task references, and seeds that nobody can choose.

The task and its seed follow from (run, node, policy, version, counter) by hashing, so a worker cannot pick
easy prompts, and a receiver rebuilds prompt and truth itself.
"""

import hashlib
from typing import Annotated, Any

from pydantic import Field, field_validator

from protocol import limits
from protocol.base import Digest, Message, Name
from protocol.encoding import encode


class TaskSpec(Message):
    """One family of tasks in a run: an environment, a family name, its configuration, and how often to draw
    it."""

    environment: Name
    name: Name
    config: dict[str, Any] = Field(default_factory=dict)
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0

    @field_validator("config")
    @classmethod
    def _encodable(cls, config: dict[str, Any]) -> dict[str, Any]:
        encode(config)
        return config

    @property
    def config_hash(self) -> bytes:
        """SHA-256 of what defines the family's questions (not its weight)."""
        return hashlib.sha256(encode([self.environment, self.name, self.config])).digest()


class TaskRef(Message):
    """One question: `seed` picks it from the family whose `config_hash` this is."""

    environment: Name
    config_hash: Digest
    seed: Annotated[int, Field(ge=0, lt=limits.HELD_OUT_SEED_LIMIT)]


def _derive(purpose: bytes, run_id: bytes, node: bytes, policy: bytes, version: int, counter: int) -> bytes:
    fields = encode([run_id, node, policy, version, counter])
    return hashlib.sha256(b"swarmnode/1 " + purpose + b"\0" + fields).digest()


def _total_weight(tasks: list[TaskSpec]) -> float:
    """Added one after the other in double precision: `sum` compensates rounding since Python 3.12, and nodes
    differ."""
    total = 0.0
    for task in tasks:
        total += task.weight
    return total


def assigned_task(
    tasks: list[TaskSpec], run_id: bytes, node: bytes, policy: bytes, version: int, counter: int
) -> TaskRef:
    """The task of a node's `counter`-th group for `policy` at `version`. Families are drawn by weight."""
    digest = _derive(b"task", run_id, node, policy, version, counter)
    point = int.from_bytes(digest[:6], "big") / 2**48 * _total_weight(tasks)
    chosen = tasks[-1]
    for task in tasks:
        point -= task.weight
        if point < 0:
            chosen = task
            break
    seed = int.from_bytes(digest[8:12], "big") % limits.TRAIN_SEED_LIMIT
    return TaskRef(environment=chosen.environment, config_hash=chosen.config_hash, seed=seed)


def group_seed(run_id: bytes, node: bytes, policy: bytes, version: int, counter: int) -> int:
    """The 64-bit key of the sampling noise of that group (see `protocol.noise`)."""
    return int.from_bytes(_derive(b"noise", run_id, node, policy, version, counter)[:8], "big")


def held_out_tasks(tasks: list[TaskSpec], count: int) -> list[TaskRef]:
    """`count` evaluation tasks on held-out seeds, families in proportion to their weights, the same for
    everyone."""
    total = _total_weight(tasks)
    refs: list[TaskRef] = []
    drawn = [0.0] * len(tasks)
    for index in range(count):
        owed = [task.weight / total * (index + 1) - done for task, done in zip(tasks, drawn, strict=True)]
        pick = owed.index(max(owed))
        drawn[pick] += 1
        seed = limits.TRAIN_SEED_LIMIT + index
        refs.append(
            TaskRef(environment=tasks[pick].environment, config_hash=tasks[pick].config_hash, seed=seed)
        )
    return refs
