"""The verifier process as a node runs it: verdicts over the channel, whatever it is handed, without torch."""

import subprocess
import sys

import pytest

from protocol.messages import Completion, RolloutGroup, SamplingContract, group_id, prompt_hash
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import encode_completion, load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.models.tiny_tasks import DEMO_TASKS
from tests.e2e.child import Child

pytestmark = pytest.mark.e2e

SENDER = b"\x05" * 32
SPEC = RunSpec(
    name="test",
    nonce=bytes(16),
    preset="swarm",
    model=BaseModelRef(name="tiny", assets=[]),
    tasks=[TaskSpec(**task) for task in DEMO_TASKS],
    sampling=SamplingContract(group_size=2, max_new_tokens=4),
)


def honest_group(counter: int) -> RolloutGroup:
    tokenizer, environment = load_tokenizer(TINY_MODEL_DIR), build_environment(SPEC.tasks)
    task = assigned_task(SPEC.tasks, SPEC.run_id, SENDER, SENDER, 0, counter)
    completions = []
    for text in ("4", "12"):
        ids = [*encode_completion(tokenizer, text), tokenizer.eos_ids[0]]
        completions.append(Completion.build(ids, [-1.0] * len(ids), [(0, len(ids))], "stop", text))
    return RolloutGroup(
        task=task,
        policy=SENDER,
        version=0,
        counter=counter,
        prompt_hash=prompt_hash(render_prompt(tokenizer, environment.question(task))),
        sampling=SPEC.sampling,
        engine="test",
        completions=completions,
        rewards=[environment.score(task, text) for text in ("4", "12")],
    )


def send_check(child: Child, body: bytes, source: str = "local") -> bytes:
    name = group_id(SENDER, body)
    child.send("check", id=name, body=body, sender=SENDER, run_id=SPEC.run_id, source=source)
    return name


def test_verdicts_come_back_in_order_and_nothing_stops_them() -> None:
    group = honest_group(1)
    foreign = group.model_copy(update={"prompt_hash": b"x" * 32, "rewards": [0.5, 0.5]})
    bodies = [
        (group.encode(), "local", None),
        (b"\xc1 not msgpack", "local", "malformed"),
        (b"\x93" * 100_000, "external", "malformed"),
        (group.encode()[:-3], "local", "malformed"),
        (foreign.encode(), "local", "prompt_mismatch"),
        (group.model_copy(update={"rewards": [0.5, 0.5]}).encode(), "local", "reward_mismatch"),
        (foreign.encode(), "external", None),
        (group.encode(), "elsewhere", "verifier_failed"),
        (honest_group(2).encode(), "local", None),
    ]
    with Child("swarmnode.processes.verifier") as child:
        child.send("configure", spec=SPEC.encode(), model_dir=str(TINY_MODEL_DIR))
        child.expect("ready")
        names = [send_check(child, body, source) for body, source, _ in bodies]
        child.interrupt()  # the node's to act on, so nothing happens
        for name, (_, source, reason) in zip(names, bodies, strict=True):
            checked = child.expect("checked")
            assert checked["id"] == name
            assert checked["ok"] is (reason is None), checked
            if reason is None:
                assert prompt_hash(checked["prompt_ids"]) != b"x" * 32 and len(checked["rewards"]) == 2
                assert (checked["completions"] is None) is (source == "local")
            else:
                assert checked["reason"].split(":")[0] == reason
                assert checked["prompt_ids"] == [] and checked["rewards"] == []
        child.send("stop")
        assert child.exit_code() == 0


def test_it_ends_on_a_termination_and_says_what_it_lacks() -> None:
    with Child("swarmnode.processes.verifier") as working, Child("swarmnode.processes.verifier") as lacking:
        working.send("configure", spec=SPEC.encode(), model_dir=str(TINY_MODEL_DIR))
        lacking.send("configure", spec=SPEC.encode(), model_dir="/nowhere")
        assert "/nowhere/tokenizer.json does not exist" in lacking.expect("failed")["reason"]
        assert lacking.exit_code() == 1
        working.expect("ready")
        working.terminate()
        assert working.exit_code() == 0


def test_checking_a_group_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from swarmnode.processes.verifier import configure\n"
        "from tests.e2e.test_verifier_process import SPEC, TINY_MODEL_DIR, honest_group\n"
        "message = {'type': 'configure', 'spec': SPEC.encode(), 'model_dir': str(TINY_MODEL_DIR)}\n"
        "verifier = configure(message)\n"
        "verifier.check(honest_group(1).encode(), 'local')\n"
        "verifier.check(honest_group(1).encode(), 'external')\n"
        "print(sorted({'torch', 'transformers', 'libp2p', 'trainer'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr[-500:]) == (0, "[]\n", "")
