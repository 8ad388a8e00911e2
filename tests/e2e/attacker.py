"""A peer that holds the invite and sends whatever it likes: a real identity on a real connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from peers.base import PeerId
from peers.discovery import Discovery
from peers.libp2p_transport import Libp2pTransport
from peers.swarm import Swarm
from protocol.identity import Identity
from protocol.invite import parse_invite
from protocol.messages import (
    Completion,
    GroupPush,
    Hello,
    Receipt,
    RolloutGroup,
    RunSpecRequest,
    SignedReply,
    prompt_hash,
)
from protocol.run_spec import RunSpec
from protocol.tasks import assigned_task
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import decode_completion, encode_completion, load_tokenizer, render_prompt
from swarmnode.runtime.run_setup import open_spec


class Attacker:
    """Knows the run as a worker does and builds groups that would pass, to be spoilt one field at a time."""

    def __init__(self, swarm: Swarm, spec: RunSpec, learner: PeerId, model_path: Path) -> None:
        self.swarm = swarm
        self.spec = spec
        self.learner = learner
        self._tokenizer = load_tokenizer(model_path)
        self._environment = build_environment(spec.tasks, spec.partial_credit)
        self._counter = 0

    def group(self, version: int, **changes: Any) -> RolloutGroup:
        """A group that breaks no rule, but for `changes`: its completions are the digit 7 and the end."""
        self._counter += 1
        key = bytes(self.swarm.identity.key)
        policy = bytes(self.learner)
        task = assigned_task(self.spec.tasks, self.spec.run_id, key, policy, version, self._counter)
        prompt = render_prompt(self._tokenizer, self._environment.question(task))
        tokens = [*encode_completion(self._tokenizer, "7"), self._tokenizer.eos_ids[0]]
        size = self.spec.sampling.group_size
        completion = Completion.build(tokens, [-1.0] * len(tokens), [(version, len(tokens))], "stop")
        reward = self._environment.score(task, decode_completion(self._tokenizer, tokens))
        fields: dict[str, Any] = {
            "task": task,
            "policy": policy,
            "version": version,
            "counter": self._counter,
            "prompt_hash": prompt_hash(prompt),
            "sampling": self.spec.sampling,
            "engine": "attacker",
            "completions": [completion] * size,
            "rewards": [reward] * size,
        }
        return RolloutGroup(**{**fields, **changes})

    def completion(self, logprob: float, version: int) -> Completion:
        """One completion with a chosen log-prob."""
        tokens = [*encode_completion(self._tokenizer, "7"), self._tokenizer.eos_ids[0]]
        return Completion.build(tokens, [logprob] * len(tokens), [(version, len(tokens))], "stop")

    async def push(self, group: RolloutGroup) -> Receipt:
        """Sign and push a group; the learner's receipt."""
        return await self.push_envelope(self.swarm.seal(group))

    async def push_envelope(self, envelope: bytes) -> Receipt:
        return await self.swarm.call(
            self.learner, GroupPush(envelope=envelope), timeout_s=30.0, expect=Receipt
        )


@asynccontextmanager
async def attacker(invite_text: str, learner_key: bytes, model_path: Path) -> AsyncIterator[Attacker]:
    """Join with an invite and connect to the learner."""
    invite = parse_invite(invite_text)
    identity = Identity.generate()
    transport = Libp2pTransport(identity, listen=["/ip4/127.0.0.1/tcp/0"])
    numbers = iter(range(1_000_000))
    swarm = Swarm(
        transport,
        identity,
        invite.run_id,
        next_sequence=lambda: next(numbers),
        on_refusal=lambda peer, reason, detail: None,
    )
    hello = Hello(name="mallory", role="worker", software="attacker/1")
    discovery = Discovery(swarm, seeds=invite.seeds, hello=lambda: hello)
    discovery.require(learner_key)  # type: ignore[arg-type]
    async with transport.running(), trio.open_nursery() as nursery:
        nursery.start_soon(swarm.run)
        nursery.start_soon(discovery.run)
        with trio.fail_after(30):
            await discovery.wait_connected(learner_key)  # type: ignore[arg-type]
        learner = PeerId(learner_key)
        reply = await swarm.call(learner, RunSpecRequest(), timeout_s=10, expect=SignedReply)
        yield Attacker(swarm, open_spec(reply.envelope, invite.run_id), learner, model_path)
        nursery.cancel_scope.cancel()
