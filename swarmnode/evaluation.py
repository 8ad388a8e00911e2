"""Accuracy on held-out tasks: one sampled answer each, at the run's temperature, the same tasks and noise for every version."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.run_spec import RunSpec
from protocol.tasks import held_out_tasks
from swarmnode.engines.base import Engine, GroupRequest
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import decode_completion, load_tokenizer, render_prompt

STRIDE = 64
"""Tasks between two reports of progress."""


@dataclass(frozen=True)
class EvalResult:
    """Share of tasks whose answer scores 1, overall and by family."""

    accuracy: float
    by_task: dict[str, float]
    count: int

    def as_dict(self) -> dict[str, object]:
        return {"accuracy": self.accuracy, "by_task": self.by_task, "count": self.count}


class Evaluator:
    """Answers held-out tasks with an engine of its own."""

    def __init__(
        self,
        spec: RunSpec,
        model_path: Path,
        *,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        threads: int = 1,
        engine: Engine | None = None,
    ) -> None:
        self._spec = spec
        self._environment = build_environment(spec.tasks)
        self._tokenizer = load_tokenizer(model_path)
        if engine is None:
            from swarmnode.engines.transformers_engine import TransformersEngine

            engine = TransformersEngine(
                model_path, device=device, dtype=dtype, threads=threads, max_batch_sequences=STRIDE
            )
        self._engine = engine

    def evaluate(
        self,
        weights_path: Path,
        version: int,
        count: int,
        on_progress: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> EvalResult:
        """Accuracy of one version on `count` held-out tasks; `stop` ends it early with what was measured so far."""
        self._engine.load(weights_path, version)
        names = {task.config_hash: task.name for task in self._spec.tasks}
        scores: dict[str, list[float]] = defaultdict(list)
        tasks = held_out_tasks(list(self._spec.tasks), count)
        for start in range(0, count, STRIDE):
            if start and stop is not None and stop():
                break
            part = tasks[start : start + STRIDE]
            requests = [
                GroupRequest(render_prompt(self._tokenizer, self._environment.question(task)), start + index, 1)
                for index, task in enumerate(part)
            ]
            answers = self._engine.generate(
                requests,
                temperature=self._spec.sampling.temperature,
                max_new_tokens=self._spec.sampling.max_new_tokens,
            )
            for task, (completion,) in zip(part, answers, strict=True):
                text = decode_completion(self._tokenizer, completion.token_ids)
                right = self._environment.score(task, text) >= 1.0
                scores[names[task.config_hash]].append(float(right))
            if on_progress is not None:
                on_progress(min(start + STRIDE, count))
        measured = [score for values in scores.values() for score in values]
        return EvalResult(
            accuracy=sum(measured) / len(measured),
            by_task={name: sum(values) / len(values) for name, values in scores.items()},
            count=len(measured),
        )
