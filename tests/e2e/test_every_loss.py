"""A fleet trains with every loss: one learner, one worker, three updates each, over libp2p.

The nodes are real and so are their children's loops, but the learner and the rollout engine run in threads of
this process: eighteen processes that import torch would take minutes. `test_fleet.py` has real ones.
"""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from transformers import AutoModelForCausalLM

from protocol.invite import parse_invite
from swarmnode.config import load_config
from swarmnode.demo.layout import free_ports, lay_out
from swarmnode.engines import building
from swarmnode.processes import rollout
from swarmnode.processes.channel import Channel, ChannelClosed
from swarmnode.processes.inbox import Inbox, Stopped
from swarmnode.processes.learner import LearnerProcess
from swarmnode.runtime.children import ChildProcess
from swarmnode.runtime.node import Node
from trainer.losses import LOSSES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

UPDATES = 3
CORRECTIONS: dict[str, dict[str, Any]] = {
    "cispo": {"importance_sampling_mode": "token_mask", "off_policy_mask_threshold": 0.5},
    "grpo": {"sat_quantile": 0.9, "delta": 4.0, "negative_veto_threshold": 0.1},
    "dapo": {"m2_threshold": 0.04, "beta": 0.01},
    "dr_grpo": {"ratio_variance_penalty": 0.04, "ratio_variance_target": 0.1},
    "decoupled_ppo": {"ess_lr_scaling": True},
    "gspo": {"top_entropy_quantile": 0.5},
}
"""Every correction is in one of the runs."""

WORK: dict[str, Callable[[Channel, Inbox], None]] = {
    "learner": lambda channel, inbox: LearnerProcess(channel, inbox).run(),
    "rollout": rollout.serve,
}


class ThreadChild:
    """As much of a `Popen` as a `ChildProcess` uses. A thread cannot be killed: it ends when its channel
    closes."""

    pid = 0

    def __init__(self, work: Callable[[Channel, Inbox], None], theirs: socket.socket) -> None:
        self.returncode = 0
        self._socket = theirs
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Channel, Inbox], None]) -> None:
        channel = Channel(self._socket)
        inbox = Inbox(channel, end_process=lambda code: None)
        inbox.start()
        try:
            work(channel, inbox)
        except (Stopped, ChannelClosed):
            pass
        except BaseException:
            self.returncode = 1
            raise
        finally:
            self._socket.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.returncode

    def kill(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    terminate = kill


@pytest.fixture
def torch_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = ChildProcess._spawn

    def spawn_thread(self: ChildProcess) -> tuple[trio.SocketStream, Any]:
        if self.name not in WORK:
            return spawn(self)
        ours, theirs = socket.socketpair()
        return trio.SocketStream(trio.socket.from_stdlib_socket(ours)), ThreadChild(WORK[self.name], theirs)

    monkeypatch.setattr(ChildProcess, "_spawn", spawn_thread)

    # Building a model replaces torch.nn.init for a while; two at once would leave it replaced for good.
    one_at_a_time = threading.RLock()

    def alone(build: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*args: Any, **kwargs: Any) -> Any:
            with one_at_a_time:
                return build(*args, **kwargs)

        return locked

    monkeypatch.setattr(building, "_empty", alone(building._empty))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", alone(AutoModelForCausalLM.from_pretrained))


@pytest.mark.parametrize("loss_type", LOSSES)
async def test_a_fleet_trains_with(loss_type: str, tmp_path: Path, torch_in_threads: None) -> None:
    algorithm = {"loss_type": loss_type, "learning_rate": 3e-4, **CORRECTIONS.get(loss_type, {})}
    layout = lay_out(
        tmp_path,
        preset="fleet",
        mode="async",
        model="tiny",
        seed=0,
        page_port=free_ports(1)[0],
        run_overrides={"algorithm": algorithm, "local_groups": 4},
        learner_overrides={"max_updates": UPDATES, "eval_prompts": 1},
    )
    # The worker's configuration names the learner's address too, so the relay is not missed.
    learner, worker = (
        Node(node.directory, load_config(node.directory.config_path), invite=parse_invite(layout.invite))
        for node in layout.nodes
        if node.name in ("learner", "worker-1")
    )
    async with trio.open_nursery() as nursery:
        for node in (learner, worker):
            nursery.start_soon(node._run)
        with trio.fail_after(90):
            while learner._roles is None or not (role := learner.roles.learner) or not role.status.final:
                await trio.sleep(0.05)
        for node in (learner, worker):
            node.stop_requested.set()
    assert role is not None
    status = role.status
    assert (status.updates, status.halted, status.version) == (UPDATES, None, UPDATES)
    assert status.metrics["grad_norm"] > 0 and status.metrics["tokens"] > 0
    assert set(status.by_age) <= {0, 1, 2, 4} and set(status.staleness) <= {0, 1, 2, 3, 4}
    assert learner.refused == {}
