"""One side of the train step benchmark: a process that makes an update whenever it is told to.

    python -m benchmarks.train_step_side SIDE MODEL ROLLOUTS DTYPE THREADS

Each line on standard input is one command, "update" or "finish"; each answer is one line of JSON.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.train_step_rollouts import TASK, Rollouts, RolloutsGroup, read_rollouts

SIDES = {
    "swarmnode": "swarmnode",
    "trl": "TRL",
    "trl_compact": "TRL, head on completions",
}
LEARNING_RATE = 1e-6
EPSILON_HIGH = 5.0
ROWS = 8
"""Completions in one of TRL's micro-batches, its default."""


class Side:
    """The parent's handle of a side's process."""

    def __init__(self, name: str, model: Path, rollouts: Path, dtype: str, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, str(model), str(rollouts), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
        )

    def update(self) -> dict[str, float]:
        """Make one update: seconds, loss, grad_norm."""
        return self._ask("update")

    def finish(self) -> dict[str, float]:
        """Peak memory over all updates."""
        return self._ask("finish")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, command: str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the side {self.name} ended with code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


def serve_swarmnode(model: Path, rollouts: Rollouts, dtype: str, link: "Link") -> None:
    """Updates of a `Learner`; a micro-batch holds the largest group, so about as many rows as TRL's."""
    from protocol.algorithm import AlgorithmSpec
    from protocol.messages import SamplingContract
    from protocol.run_spec import BaseModelRef, RunSpec
    from trainer.learner import Learner
    from trainer.policy import load_policy

    size = len(rollouts.groups[0].completions)
    spec = RunSpec(
        name="train-step",
        nonce=bytes(16),
        preset="swarm",
        model=BaseModelRef(name="model", assets=[]),
        tasks=[TASK],
        sampling=SamplingContract(group_size=size, max_new_tokens=512),
        local_groups=len(rollouts.groups),
        algorithm=AlgorithmSpec(
            loss_type="cispo",
            epsilon_high=EPSILON_HIGH,
            learning_rate=LEARNING_RATE,
            adam_beta2=0.999,
            max_grad_norm=1.0,
        ),
    )
    budget = max(len(group.prompt) + sum(map(len, group.completions)) - size for group in rollouts.groups)
    learner = Learner(load_policy(model, dtype=dtype), spec, bytes(32), token_budget=budget)
    while link.next_command() == "update":
        for index, group in enumerate(rollouts.groups):
            learner.add_group(training_group(group, index, learner.version))
        clock = Clock()
        metrics = learner.update().metrics
        link.answer(**clock.passed(), loss=metrics["loss"], grad_norm=metrics["grad_norm"])


def training_group(group: RolloutsGroup, index: int, version: int) -> Any:
    """As made by the learner's present version: every ratio is 1, as TRL takes it to be."""
    import numpy as np

    from trainer.groups import TrainingGroup

    return TrainingGroup(
        id=version.to_bytes(16, "big") + index.to_bytes(16, "big"),
        is_local=True,
        oldest_version=version,
        prompt_ids=np.asarray(group.prompt),
        completions=tuple(np.asarray(ids) for ids in group.completions),
        behavior_logprobs=None,
        rewards=tuple(group.rewards),
    )


def serve_trl(model: Path, rollouts: Rollouts, dtype: str, link: "Link", *, compact: bool) -> None:
    """`GRPOTrainer.train`, held up before each step until the next command."""
    import torch
    import trl.trainer.utils
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if compact:
        # Read in one place only: whether positions without a label are left out before the last layer.
        trl.trainer.utils._use_triton = lambda device: True
    size = len(rollouts.groups[0].completions)
    count = size * len(rollouts.groups)

    class Gate(TrainerCallback):
        """Times a step from its first micro-batch to the end of the optimizer's step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if link.next_command() != "update":
                control.should_training_stop = True
                raise Finished
            self.clock = Clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.passed = self.clock.passed()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "grad_norm" in logs:
                link.answer(**self.passed, loss=logs["loss"], grad_norm=float(logs["grad_norm"]))

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        order = [group for group in rollouts.groups for _ in group.completions]
        return {
            "prompt_ids": [group.prompt for group in order],
            "completion_ids": [ids for group in rollouts.groups for ids in group.completions],
            "logprobs": None,
            "reward": [reward for group in rollouts.groups for reward in group.rewards],
        }

    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=lambda prompts, completions, reward, **_: reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=dtype == "bfloat16",
                gradient_checkpointing=False,
                per_device_train_batch_size=ROWS,
                gradient_accumulation_steps=count // ROWS,
                num_generations=size,
                max_completion_length=512,
                loss_type="cispo",
                epsilon_high=EPSILON_HIGH,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                max_steps=10_000,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * len(rollouts.groups)}),
            processing_class=AutoTokenizer.from_pretrained(model),
            rollout_func=rollout,
            callbacks=[Gate()],
        )
        with suppress(Finished):
            trainer.train()


class Clock:
    """Time since it was made: on the wall, and of processors, which other programs do not lengthen."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def passed(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._wall,
            "processor_seconds": time.process_time() - self._processor,
        }


class Finished(Exception):
    """No further update is wanted."""


class Link:
    """The side's end of its pipes. What libraries print goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._idle_mib = 0.0

    def next_command(self) -> str:
        """Wait for one. Memory is watched from the first on, so that loading does not count."""
        command = sys.stdin.readline().strip()
        if not self._idle_mib:
            self._idle_mib = memory_mib("RssAnon")
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # restarts VmHWM
        return command

    def answer(self, **values: float) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def answer_memory(self) -> None:
        """Peak since the first command. What is mapped from files (libraries) is taken off."""
        peak, files = memory_mib("VmHWM"), memory_mib("RssFile")
        self.answer(peak_mib=peak, peak_anonymous_mib=peak - files, idle_anonymous_mib=self._idle_mib)


def memory_mib(field: str) -> float:
    """A field of this process's status, in MiB."""
    for row in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = row.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise KeyError(field)


def main() -> None:
    name, model, rollouts, dtype, threads = sys.argv[1:]
    import torch

    torch.set_num_threads(int(threads))
    link, found = Link(), read_rollouts(Path(rollouts))
    if name == "swarmnode":
        serve_swarmnode(Path(model), found, dtype, link)
    else:
        serve_trl(Path(model), found, dtype, link, compact=name == "trl_compact")
    link.answer_memory()


if __name__ == "__main__":
    main()
