"""The curves of other nodes' policies, as they tell them in their presence."""

from collections.abc import Callable

import trio

from protocol.messages import Presence
from swarmnode.runtime.events import MAX_OTHERS, Journal

LEAST_INTERVAL_S = 1.0


class CurvesOfOthers:
    """Whatever others claim, it costs bounded memory, and their points never look like this node's own.

    `is_plotted` says whose curves are of interest; `name_of` gives what a node calls itself.
    """

    def __init__(
        self,
        journal: Journal,
        own_name: str,
        is_plotted: Callable[[bytes], bool],
        name_of: Callable[[bytes], str],
    ) -> None:
        self._journal = journal
        self._is_plotted = is_plotted
        self._name_of = name_of
        self._labels: dict[bytes, str] = {}
        self._taken = {own_name}
        self._last: dict[bytes, tuple[float, int, float | None]] = {}

    def heard(self, author: bytes, presence: Presence) -> None:
        """A node's signed presence came."""
        if presence.reward is None and presence.accuracy is None:
            return
        if author not in self._last and (len(self._last) >= MAX_OTHERS or not self._is_plotted(author)):
            return
        version = next((one.version for one in presence.policies if one.policy == author), 0)
        now = trio.current_time()
        last_s, last_version, last_accuracy = self._last.get(author, (-LEAST_INTERVAL_S, -1, None))
        if now - last_s < LEAST_INTERVAL_S:
            return
        self._last[author] = (now, version, presence.accuracy)
        label = self._label(author)
        if presence.reward is not None and version != last_version:
            self._journal.point_of_other("reward", author, label, version, presence.reward)
        if presence.accuracy is not None and presence.accuracy != last_accuracy:
            self._journal.point_of_other("accuracy", author, label, version, presence.accuracy)

    def _label(self, author: bytes) -> str:
        if author not in self._labels:
            name = self._name_of(author)
            self._labels[author] = f"{name} {author.hex()[:6]}" if name in self._taken else name
            self._taken.add(self._labels[author])
        return self._labels[author]
