"""When a run has collapsed: what an update measures stays below a floor for several updates in a row.

Two figures are watched, because both fall long before the loss is not a number any more: the effective share
of tokens under their weights π/μ (near 0: the policy has left what its data is about), and the entropy of the
policy (near 0: it gives one answer whatever is asked). Pure; the learner asks before each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HaltRules:
    """Floors, and after how many updates in a row below one of them to stop. A floor of 0 watches nothing."""

    min_ess: float = 0.1
    """Of `token_ess_ratio`: by tokens, so that long completions do not look like a collapse."""
    min_entropy: float = 1e-3
    """Of `entropy`, in nats per token."""
    halt_after: int = 5


@dataclass
class CollapseWatch:
    """`low` counts the updates in a row below each floor; `last_good` is the last version measured above
    both."""

    rules: HaltRules
    last_good: int = 0
    low: dict[str, int] = field(default_factory=dict)

    @property
    def is_suspicious(self) -> bool:
        """Whether the last update measured something below its floor."""
        return any(self.low.values())

    def observe(self, version: int, measured: Mapping[str, float]) -> str | None:
        """Take in what the update from `version` measured of it. Returns why training must stop, or None."""
        floors = {"token_ess_ratio": self.rules.min_ess, "entropy": self.rules.min_entropy}
        for name, floor in floors.items():
            self.low[name] = self.low.get(name, 0) + 1 if measured[name] < floor else 0
        if not self.is_suspicious:
            self.last_good = version
        for name, floor in floors.items():
            if self.low[name] >= self.rules.halt_after:
                return (
                    f"{name} was below {floor:g} for {self.low[name]} updates, at last {measured[name]:.3g}"
                )
        return None

    def forgive(self, version: int) -> None:
        """The weights of a good version are now those of `version`."""
        self.low.clear()
        self.last_good = version
