"""Evaluation: how many held-out questions the published weights answer, one sample each at the run's
temperature."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from protocol.run_spec import RunSpec
from protocol.tasks import TaskRef, held_out_tasks
from swarmnode.engines.base import Engine, GroupRequest
from swarmnode.environments.base import Environment
from swarmnode.environments.prompt import ModelTokenizer, decode_completion, render_prompt


@dataclass(frozen=True)
class Evaluation:
    """Share of `count` held-out questions answered rightly, and over those of each task family."""

    accuracy: float
    by_task: dict[str, float]
    count: int


def evaluate(
    engine: Engine,
    environment: Environment,
    tokenizer: ModelTokenizer,
    spec: RunSpec,
    *,
    count: int,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Evaluation | None:
    """Answer the first `count` held-out questions with the engine's loaded weights; None when asked to stop.

    The sampling noise of a question is the same for every version, so that two versions differ by their
    weights alone.
    """
    tasks = held_out_tasks(spec.tasks, count)
    right: list[float] = []
    for start in range(0, count, batch_size):
        if should_stop():
            return None
        part = tasks[start : start + batch_size]
        requests = [
            GroupRequest(
                prompt_ids=render_prompt(tokenizer, environment.question(task)),
                group_seed=_noise_seed(start + offset),
                group_size=1,
            )
            for offset, task in enumerate(part)
        ]
        groups = engine.generate(
            requests,
            temperature=spec.sampling.temperature,
            max_new_tokens=spec.sampling.max_new_tokens,
        )
        for task, (completion,) in zip(part, groups, strict=True):
            score = environment.score(task, decode_completion(tokenizer, completion.token_ids))
            right.append(float(score >= 1.0))
        on_progress(start + len(part))
    return Evaluation(accuracy=sum(right) / count, by_task=_by_task(spec, tasks, right), count=count)


def _noise_seed(index: int) -> int:
    digest = hashlib.sha256(b"swarmnode/1 evaluation\0" + index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big")


def _by_task(spec: RunSpec, tasks: list[TaskRef], right: list[float]) -> dict[str, float]:
    """Accuracy per family; families that share a name are told apart by their config's hash."""
    plain_names = [task.name for task in spec.tasks]
    names = {
        task.config_hash: task.name
        if plain_names.count(task.name) == 1
        else f"{task.name}-{task.config_hash.hex()[:6]}"
        for task in spec.tasks
    }
    scores: dict[str, list[float]] = {}
    for task, score in zip(tasks, right, strict=True):
        scores.setdefault(names[task.config_hash], []).append(score)
    return {name: sum(values) / len(values) for name, values in scores.items()}
