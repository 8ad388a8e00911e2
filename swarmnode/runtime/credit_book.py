"""Which worker was granted how many groups, and how much each may have at once. Pure: time is given."""

import heapq
import math
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
    looked_at_s: float = math.inf
    """When it is due to be looked at for late groups."""

    @property
    def lifetime_s(self) -> float:
        return min(max(SHORTEST_LIFETIME_S, LIFETIME_FACTOR * self.slowest_s), LONGEST_LIFETIME_S)

    @property
    def outstanding(self) -> int:
        return len(self.granted) - self.given_up

    @property
    def due_s(self) -> float:
        """When the next group is late, or the oldest of all is forgotten."""
        if not self.granted:
            return math.inf
        forgotten = self.granted[0] + 2 * LONGEST_LIFETIME_S
        if self.outstanding:
            return min(forgotten, self.granted[self.given_up] + self.lifetime_s)
        return forgotten


class CreditBook:
    """Invariant: a worker's outstanding groups never exceed its allowance at the time of the grant.

    What is outstanding in all is kept as a sum, and accounts are looked at when something of theirs is due,
    so that an answer costs the same with thousands of workers as with two.
    """

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()
        self._outstanding = 0
        self._due: list[tuple[float, bytes]] = []

    def outstanding(self, now: float) -> int:
        """Groups granted to anybody, not received, and still expected."""
        while self._due and self._due[0][0] <= now:
            due_s, worker = heapq.heappop(self._due)
            account = self._accounts.get(worker)
            if account is not None and account.looked_at_s == due_s:
                account.looked_at_s = math.inf
                self._look_at(worker, account, now)
        return self._outstanding

    def room(self, worker: bytes, now: float) -> int:
        """How many more groups this worker may be granted."""
        account = self._accounts.get(worker)
        if account is None:
            return FIRST_ALLOWANCE
        self._look_at(worker, account, now)
        return max(0, account.allowance - account.outstanding)

    def undelivered(self, worker: bytes) -> int:
        """Groups granted to one worker that have not come, those that nobody expects any more included."""
        account = self._accounts.get(worker)
        return 0 if account is None else len(account.granted)

    def grant(self, worker: bytes, count: int, now: float) -> None:
        """Note a grant."""
        account = self._accounts.setdefault(worker, _Account())
        self._accounts.move_to_end(worker)
        account.granted.extend([now] * count)
        self._changed(worker, account, account.outstanding - count)
        while len(self._accounts) > MAX_WORKERS:
            _, evicted = self._accounts.popitem(last=False)
            self._outstanding -= evicted.outstanding

    def received(self, worker: bytes, now: float, *, accepted: bool) -> None:
        """A group of this worker came, with credit or without."""
        account = self._accounts.get(worker)
        if account is None:
            return
        if account.granted:
            before = account.outstanding
            account.slowest_s = max(0.9 * account.slowest_s, now - account.granted.popleft())
            account.given_up = max(0, account.given_up - 1)
            self._changed(worker, account, before)
        if accepted:
            account.allowance = min(2 * account.allowance, LARGEST_ALLOWANCE)

    def forget_grants(self, worker: bytes) -> None:
        """The worker's connection is gone: what it was granted can be granted to others."""
        account = self._accounts.get(worker)
        if account is not None:
            before = account.outstanding
            account.granted.clear()
            account.given_up = 0
            self._changed(worker, account, before)

    def _look_at(self, worker: bytes, account: _Account, now: float) -> None:
        before = account.outstanding
        _give_up_late(account, now)
        self._changed(worker, account, before)

    def _changed(self, worker: bytes, account: _Account, before: int) -> None:
        """Keep the sum and the next look right."""
        self._outstanding += account.outstanding - before
        due_s = account.due_s
        if due_s < account.looked_at_s:
            account.looked_at_s = due_s
            heapq.heappush(self._due, (due_s, worker))


def _give_up_late(account: _Account, now: float) -> None:
    expected = account.outstanding
    lifetime_s, late = account.lifetime_s, account.given_up
    while late < len(account.granted) and account.granted[late] + lifetime_s <= now:
        late += 1
    account.given_up = late
    if account.outstanding < expected:
        account.allowance = max(1, account.allowance // 2)
    while account.granted and account.granted[0] + 2 * LONGEST_LIFETIME_S <= now:
        account.granted.popleft()
        account.given_up = max(0, account.given_up - 1)
