"""Which worker was granted how many groups, and how much each may have at once. Pure: time is given."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

FIRST_ALLOWANCE = 8
"""What a worker may have outstanding before it delivered anything; doubled by each group that it delivers,
halved when what it was granted does not come. So a peer that asks and never delivers soon holds one group
of a batch and not the batch."""
LARGEST_ALLOWANCE = 1024

SHORTEST_LIFETIME_S = 60.0
LONGEST_LIFETIME_S = 600.0
LIFETIME_FACTOR = 3.0
"""A granted group that has not come after this many times the worker's slowest delivery is granted to
somebody else."""

MAX_WORKERS = 4096


@dataclass
class _Account:
    granted: deque[float] = field(default_factory=deque)
    """When each group that has not come was granted, oldest first; those given up too, to learn from when
    they come after all."""
    given_up: int = 0
    """How many of `granted`, from the oldest on, do not count any more."""
    allowance: int = FIRST_ALLOWANCE
    slowest_s: float = 0.0

    @property
    def lifetime_s(self) -> float:
        return min(max(SHORTEST_LIFETIME_S, LIFETIME_FACTOR * self.slowest_s), LONGEST_LIFETIME_S)

    @property
    def outstanding(self) -> int:
        return len(self.granted) - self.given_up


class CreditBook:
    """Invariant: a worker's outstanding groups never exceed its allowance at the time of the grant."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()

    def outstanding(self, now: float) -> int:
        """Groups granted to anybody, not received, and still expected."""
        total = 0
        for account in self._accounts.values():
            self._give_up_late(account, now)
            total += account.outstanding
        return total

    def room(self, worker: bytes, now: float) -> int:
        """How many more groups this worker may be granted."""
        account = self._accounts.get(worker)
        if account is None:
            return FIRST_ALLOWANCE
        self._give_up_late(account, now)
        return max(0, account.allowance - account.outstanding)

    def grant(self, worker: bytes, count: int, now: float) -> None:
        """Note a grant."""
        account = self._accounts.setdefault(worker, _Account())
        self._accounts.move_to_end(worker)
        account.granted.extend([now] * count)
        while len(self._accounts) > MAX_WORKERS:
            self._accounts.popitem(last=False)

    def received(self, worker: bytes, now: float, *, accepted: bool) -> None:
        """A group of this worker came, with credit or without."""
        account = self._accounts.get(worker)
        if account is None:
            return
        if account.granted:
            account.slowest_s = max(0.9 * account.slowest_s, now - account.granted.popleft())
            account.given_up = max(0, account.given_up - 1)
        if accepted:
            account.allowance = min(2 * account.allowance, LARGEST_ALLOWANCE)

    def forget_grants(self, worker: bytes) -> None:
        """The worker's connection is gone: what it was granted can be granted to others."""
        account = self._accounts.get(worker)
        if account is not None:
            account.granted.clear()
            account.given_up = 0

    def _give_up_late(self, account: _Account, now: float) -> None:
        expected = account.outstanding
        late = sum(granted + account.lifetime_s <= now for granted in account.granted)
        account.given_up = max(account.given_up, late)
        if account.outstanding < expected:
            account.allowance = max(1, account.allowance // 2)
        while account.granted and account.granted[0] + 2 * LONGEST_LIFETIME_S <= now:
            account.granted.popleft()
            account.given_up = max(0, account.given_up - 1)
