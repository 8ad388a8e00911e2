"""What the page and others are told of a learner."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class LearnerStatus:
    """Totals are over the whole run, restarts included."""

    state: str = "starting"
    version: int | None = None
    updates: int = 0
    published_versions: int = 0
    eval_before: float | None = None
    eval_after: float | None = None
    final: bool = False
    halted: str | None = None
    """Why training stopped for good; None while it goes on."""
    metrics: dict[str, float] = field(default_factory=dict)
    by_age: dict[int, dict[str, float]] = field(default_factory=dict)
    """Figures of the last update by how many versions ago its tokens were made."""
    staleness: Counter[int] = field(default_factory=Counter)
    max_staleness_seen: int = 0

    def count_from_ledger(self, updates: int, staleness: Mapping[int, int]) -> None:
        """The ledger knows what earlier starts did."""
        self.updates = updates
        self.staleness = Counter(staleness)
        self.max_staleness_seen = max(staleness, default=0)

    def note_update(
        self,
        metrics: Mapping[str, float],
        staleness: Mapping[int, int],
        by_age: Mapping[int, Mapping[str, float]],
    ) -> None:
        """One more update, and what it consumed."""
        self.updates += 1
        self.by_age = {int(lag): dict(figures) for lag, figures in by_age.items()}
        self.metrics = {name: float(value) for name, value in metrics.items()}
        for lag, count in staleness.items():
            self.staleness[int(lag)] += count
            self.max_staleness_seen = max(self.max_staleness_seen, int(lag))

    def note_evaluation(self, version: int, accuracy: float, final: bool) -> None:
        """An evaluation of version 0 is the one before training, however often it is done."""
        if self.eval_before is None or (version == 0 and not final):
            self.eval_before = accuracy
        else:
            self.eval_after = accuracy
        self.final = self.final or final
