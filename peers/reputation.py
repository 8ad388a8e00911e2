"""How far each peer is trusted and how fast it is: penalties by reason, weighted choice. No clock."""

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from peers.base import PeerId
from protocol.refusals import RefusalReason

HEAL_TIME_S = 600.0
"""After this long without a new fault, a peer's distance from full trust has shrunk to 1/e."""

MAX_PEERS = 8_192
"""Records kept; the one untouched for longest goes first."""

_FORGERY = 0.5
_CHEATING = 0.25
_SLOPPY = 0.1

PENALTIES: dict[RefusalReason, float] = {
    # Cannot happen by accident on an authenticated connection.
    RefusalReason.BAD_SIGNATURE: _FORGERY,
    RefusalReason.WRONG_SENDER: _FORGERY,
    RefusalReason.WRONG_HASH: _FORGERY,
    RefusalReason.REPLAYED: _SLOPPY,
    RefusalReason.WRONG_SEED: _CHEATING,
    RefusalReason.BAD_LOGPROBS: _CHEATING,
    RefusalReason.BAD_TOKENS: _CHEATING,
    RefusalReason.BAD_VERSIONS: _CHEATING,
    RefusalReason.PROMPT_MISMATCH: _CHEATING,
    RefusalReason.REWARD_MISMATCH: _CHEATING,
    RefusalReason.OVERSIZED: _SLOPPY,
    RefusalReason.MALFORMED: _SLOPPY,
    RefusalReason.WRONG_PROTOCOL: _SLOPPY,
    RefusalReason.WRONG_RUN: _SLOPPY,
    RefusalReason.WRONG_KIND: _SLOPPY,
    RefusalReason.RAGGED_GROUP: _SLOPPY,
    RefusalReason.WRONG_SAMPLING: _SLOPPY,
    RefusalReason.UNKNOWN_TASK: _SLOPPY,
}
"""Share of the trust that one fault costs. What honest peers do in the ordinary course (too stale, not
found, busy, no credit) costs nothing."""

_SUCCESS_WEIGHT = 0.2
"""Weight of the newest outcome or rate in its moving average."""

_EXPLORATION = 0.02
"""Least weight of a peer relative to the best one, so that a demoted peer can prove itself again."""


@dataclass
class _Record:
    trust: float = 1.0
    trust_at_s: float = 0.0
    success: float = 1.0
    rate_bytes_per_s: float | None = None


class Reputation:
    """Trust in [0, 1] per peer. Peers are demoted, not banned: trust heals, and choices explore a little."""

    def __init__(self, *, heal_time_s: float = HEAL_TIME_S, max_peers: int = MAX_PEERS) -> None:
        self._heal_time_s = heal_time_s
        self._max_peers = max_peers
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def score(self, peer: PeerId, now_s: float) -> float:
        """Trust in `peer` at `now_s` (monotonic seconds, one clock for all calls). Unknown peers have 1."""
        record = self._records.get(peer)
        return 1.0 if record is None else self._healed(record, now_s)

    def penalize(self, peer: PeerId, reason: RefusalReason, now_s: float) -> float:
        """Take the reason's share of the trust in `peer`; the new score."""
        penalty = PENALTIES.get(reason, 0.0)
        if penalty == 0.0:
            return self.score(peer, now_s)
        record = self._touch(peer, now_s)
        record.trust = self._healed(record, now_s) * (1.0 - penalty)
        record.trust_at_s = now_s
        return record.trust

    def record_success(self, peer: PeerId, size_bytes: int, seconds: float, now_s: float) -> None:
        """`peer` delivered `size_bytes` in `seconds`."""
        record = self._touch(peer, now_s)
        record.success += _SUCCESS_WEIGHT * (1.0 - record.success)
        rate = size_bytes / max(seconds, 1e-6)
        if record.rate_bytes_per_s is None:
            record.rate_bytes_per_s = rate
        else:
            record.rate_bytes_per_s += _SUCCESS_WEIGHT * (rate - record.rate_bytes_per_s)

    def record_failure(self, peer: PeerId, now_s: float) -> None:
        """A request to `peer` failed or ran out of time: no fault of trust, but it will be asked less."""
        record = self._touch(peer, now_s)
        record.success -= _SUCCESS_WEIGHT * record.success

    def rate_bytes_per_s(self, peer: PeerId) -> float | None:
        """Moving average of what `peer` delivered, None before the first delivery."""
        record = self._records.get(peer)
        return None if record is None else record.rate_bytes_per_s

    def weights(self, peers: Sequence[PeerId], now_s: float) -> list[float]:
        """trust × success × rate of each peer. A peer never measured counts as one of average rate."""
        known = [rate for peer in peers if (rate := self.rate_bytes_per_s(peer)) is not None]
        assumed = sum(known) / len(known) if known else 1.0
        weights: list[float] = []
        for peer in peers:
            record = self._records.get(peer, _Record())
            rate = assumed if record.rate_bytes_per_s is None else record.rate_bytes_per_s
            weights.append(self._healed(record, now_s) * record.success * rate)
        floor = max(weights, default=0.0) * _EXPLORATION
        return [max(weight, floor) for weight in weights]

    def choose(self, peers: Sequence[PeerId], rng: random.Random, now_s: float) -> PeerId:
        """One of `peers` (not empty), with probability in proportion to its weight."""
        weights = self.weights(peers, now_s)
        if sum(weights) <= 0.0:
            return rng.choice(peers)
        return rng.choices(peers, weights)[0]

    def _healed(self, record: _Record, now_s: float) -> float:
        age_s = max(0.0, now_s - record.trust_at_s)
        return 1.0 - (1.0 - record.trust) * math.exp(-age_s / self._heal_time_s)

    def _touch(self, peer: PeerId, now_s: float) -> _Record:
        record = self._records.setdefault(peer, _Record(trust_at_s=now_s))
        self._records.move_to_end(peer)
        while len(self._records) > self._max_peers:
            self._records.popitem(last=False)
        return record
