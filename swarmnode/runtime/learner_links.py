"""How a worker reaches its learner: over the network, or within the same node."""

from peers.base import PeerId
from peers.swarm import Swarm
from protocol.envelope import open_envelope
from protocol.messages import Credit, CreditRequest, GroupPush, Receipt
from swarmnode.runtime.learner_role import LearnerRole

CREDIT_TIMEOUT_S = 10.0
PUSH_TIMEOUT_S = 45.0


class RemoteLearner:
    """A `LearnerLink` over the network. The learner of a policy is the node whose key is the policy's id."""

    def __init__(self, swarm: Swarm, policy: bytes) -> None:
        self._swarm = swarm
        self._policy = policy

    async def credit(self, version: int, wanted: int) -> Credit:
        request = CreditRequest(policy=self._policy, version=version, wanted=wanted)
        return await self._swarm.call(
            PeerId(self._policy), request, timeout_s=CREDIT_TIMEOUT_S, expect=Credit
        )

    async def push(self, envelope: bytes) -> Receipt:
        return await self._swarm.call(
            PeerId(self._policy), GroupPush(envelope=envelope), timeout_s=PUSH_TIMEOUT_S, expect=Receipt
        )


class LocalLearner:
    """A `LearnerLink` within one node (preset `swarm`)."""

    def __init__(self, learner: LearnerRole) -> None:
        self._learner = learner

    async def credit(self, version: int, wanted: int) -> Credit:
        request = CreditRequest(policy=self._learner.policy, version=version, wanted=wanted)
        return self._learner.credit(self._learner.policy, request)

    async def push(self, envelope: bytes) -> Receipt:
        return await self._learner.receive_local(open_envelope(envelope, run_id=self._learner.run_id))
