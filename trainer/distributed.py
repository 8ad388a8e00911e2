"""Several processes that train one policy: the first leads, the others do what it says.

The leader broadcasts messages (msgpack and safetensors, never pickle) on a group of its own that goes through
the host's memory; what the model computes together goes through the default group. Processes are joined
either by `torchrun --nproc-per-node N`, which sets the usual variables, or by a leader that starts the
others itself.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)
"""For all processes to come together, and for one layer of a joint computation: beyond it, one hangs."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
IDLE_TIMEOUT = timedelta(days=30)
"""How long a follower waits for the leader's next message. The leader's death ends the wait at once."""


@dataclass(frozen=True)
class Message:
    """What the leader says: an action, plain values, tensors."""

    action: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class LeaderGone(Exception):
    """No message can come any more."""


class Processes:
    """This process's place among those that train one policy. Rank 0 leads."""

    def __init__(self, device_type: str, meeting: Path | None = None) -> None:
        """Join the others, who and where the variables of torchrun tell; with `meeting`, a file that does not
        exist yet or that the others made, nobody listens on a port for it. One at a time per process."""
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        where = None if meeting is None else f"file://{meeting}"
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, init_method=where, timeout=TIMEOUT, rank=rank, world_size=count)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._messages = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self.mesh: DeviceMesh = init_device_mesh(device_type, (self.count,))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def send(self, action: str, tensors: Mapping[str, Tensor] | None = None, **values: Any) -> None:
        """Tell the followers. The leader's part of a conversation that `receive` is the other part of."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
        content = msgpack.packb([action, values, save(plain)])
        payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(payload)]), src=0, group=self._messages)
        dist.broadcast(payload, src=0, group=self._messages)

    def receive(self) -> Message:
        """The leader's next message. Raises `LeaderGone`."""
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.broadcast(size, src=0, group=self._messages)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, src=0, group=self._messages)
        except RuntimeError as error:
            raise LeaderGone("the process that leads is gone") from error
        action, values, tensors = msgpack.unpackb(payload.numpy().tobytes())
        return Message(action, values, load(tensors))

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def started_followers(count: int, device_type: str) -> Iterator[Processes]:
    """Start `count` − 1 followers on this machine and lead them; they end with the leader.

    This is what torchrun does, for a process that is itself a child with open sockets. The leader ends at
    once when a follower does: alone it could go no further.
    """
    # What passes between them stays on this machine.
    shared = {"WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    leaving = threading.Event()
    followers = []
    with TemporaryDirectory(prefix="swarmnode-") as folder:
        meeting = Path(folder) / "meeting"
        try:
            for rank in range(1, count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                followers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "trainer.follower", device_type, str(meeting)],
                        env={**os.environ, **shared, **own},
                    )
                )
            for follower in followers:
                threading.Thread(target=_end_with, args=(follower, leaving), daemon=True).start()
            os.environ.update(shared, RANK="0", LOCAL_RANK="0")
            yield Processes(device_type, meeting)
        finally:
            leaving.set()
            for follower in followers:
                follower.kill()


def _end_with(follower: "subprocess.Popen[bytes]", leaving: threading.Event) -> None:
    code = follower.wait()
    if not leaving.is_set():
        log.error("process %d that trains with this one ended with code %d", follower.pid, code)
        os._exit(1)
