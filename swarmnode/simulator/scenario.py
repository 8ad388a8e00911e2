"""What is simulated: a TOML file, unknown keys are errors, every key has a unit in its name or its text."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarmnode.scheduler.capacity import Demand
from swarmnode.scheduler.settings import PlanSettings

SHIPPED = Path(__file__).parent / "scenarios"

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class ScenarioError(ValueError):
    """The file cannot be used; the message is one line that says where and what."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What is trained."""

    batch_groups: Annotated[int, Field(ge=1)] = 64
    """Groups per update (R); in kind `swarm` the local ones (SAPO's I)."""
    external_groups: Annotated[int, Field(ge=0)] = 0
    """Kind `swarm`: other nodes' groups per update (SAPO's J)."""
    train_s: Positive = 30.0
    train_spread: NotNegative = 0.05
    """Standard deviation of an update's time, relative."""
    max_staleness: Annotated[int, Field(ge=0)] = 6
    publish_every: Annotated[int, Field(ge=1)] | None = None
    """None: κ = max(1, S − 1)."""
    pacing_batches: Annotated[int, Field(ge=1)] | None = None
    """None: as many as it takes to keep groups on their way (`pacing_batches_needed`)."""
    form: Literal["conservative", "overlapped"] = "overlapped"
    """Whether workers stop while they fetch a version."""
    group_size: Annotated[int, Field(ge=1)] = 8
    completion_tokens: Positive = 1000.0
    length_spread: NotNegative = 0.4
    """Standard deviation of the time of a group, relative: answers differ in length."""
    learner_price_per_hour: NotNegative = 0.0


class WeightsSection(Section):
    delta_mb: Positive = 100.0
    """What a worker fetches that has the version before."""
    snapshot_mb: Positive = 1000.0
    source_upload_mbps: Positive = 1000.0
    load_s: NotNegative = 2.0
    overhead: Annotated[float, Field(ge=1)] = 1.15
    """Of a broadcast over the fluid limit."""


class PlanSection(Section):
    """Who is activated."""

    policy: Literal["plan", "everyone", "cheapest", "cheapest_per_group", "random"] = "plan"
    """The node's planner, or one of what it is compared with."""
    overbuy: Positive = 1.0
    """Capacity over the rule that the other policies buy."""
    shortfall_probability: Annotated[float, Field(gt=0, lt=1)] = 0.05
    owner_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    region_mbps: dict[str, NotNegative] = {}
    budget_per_hour: NotNegative | None = None
    spare_share: NotNegative = 0.1
    hysteresis: NotNegative = 0.05
    check_every_s: Positive = 30.0
    """How often the plan is compared with what is measured."""
    noticed_after_s: NotNegative = 5.0
    """From a worker's loss until the learner knows."""
    exact_up_to: Annotated[int, Field(ge=0)] = 64


class TrustSection(Section):
    audit_share: Share = 0.1
    """Of a worker's groups that the auditor recomputes; cheats among them are found."""
    exclude_below: Share = 0.35
    """A worker trusted less than this gets no more credit."""


class NodeClass(Section):
    """Machines that are alike."""

    name: str
    count: Annotated[int, Field(ge=1, le=200_000)]
    region: str = "here"
    groups_per_min: Positive = 1.0
    rate_spread: NotNegative = 0.0
    """Between machines, relative."""
    rate_wobble: NotNegative = 0.05
    """Of one machine from one group to the next, relative, beyond the lengths of answers."""
    claims: Positive = 1.0
    """What it says of its rate, over the truth."""
    groups_in_hand: Annotated[int, Field(ge=1, le=1024)] = 8
    upload_mbps: Positive = 1000.0
    download_mbps: Positive = 1000.0
    bandwidth_spread: NotNegative = 0.0
    round_trip_ms: NotNegative = 30.0
    price_per_hour: NotNegative = 0.0
    price_spread: NotNegative = 0.0
    price_walk_per_hour: NotNegative = 0.0
    """Standard deviation of a price after an hour, relative; prices move every ten minutes."""
    departures_per_hour: NotNegative = 0.0
    returns_after_s: Positive = 600.0
    """Mean time until a machine that left is back."""
    present_share: Share = 1.0
    """Of the machines that are there at the start."""
    nat_share: Share = 0.0
    """Of them, those that cannot hand chunks to others and are reached over a relay."""
    cheat_share: Share = 0.0
    owners: Annotated[int, Field(ge=0)] = 0
    """How many owners they belong to; 0: each its own."""


class SwarmSection(Section):
    """Kind `swarm`: how nodes find each other's groups."""

    neighbours: Annotated[int, Field(ge=1, le=512)] = 16
    """Connections of a node; it hears and pulls from these."""
    gossip_s: NotNegative = 2.0
    """Mean delay of an announcement."""
    gossip_loss: Share = 0.05
    informative_share: Share = 0.6
    """Of groups whose rewards differ."""
    announce: Literal["all", "informative"] = "all"
    candidates_per_group: Annotated[int, Field(ge=1)] = 2


class Scenario(Section):
    name: str
    about: str = ""
    kind: Literal["fleet", "swarm"] = "fleet"
    seed: int = 0
    duration_s: Positive = 3600.0
    warmup_s: NotNegative = 300.0
    """Left out of shares and means: until the first batches are there."""
    run: RunSection = RunSection()
    weights: WeightsSection = WeightsSection()
    plan: PlanSection = PlanSection()
    trust: TrustSection = TrustSection()
    swarm: SwarmSection = SwarmSection()
    nodes: Annotated[list[NodeClass], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        if self.warmup_s >= self.duration_s:
            raise ValueError("warmup_s must be less than duration_s")
        if len({one.name for one in self.nodes}) != len(self.nodes):
            raise ValueError("two [[nodes]] have the same name")
        if self.kind == "fleet" and self.run.external_groups:
            raise ValueError("kind 'fleet' has one policy: external_groups must be 0")
        self.demand()
        return self

    def demand(self) -> Demand:
        """Of the learner, as the capacity rule knows it. Raises ValueError if no run can have it."""
        run = self.run
        return Demand(
            run.batch_groups, run.train_s, run.max_staleness, run.publish_every, run.form, run.pacing_batches
        )

    def plan_settings(self) -> PlanSettings:
        plan = self.plan
        return PlanSettings(
            shortfall_probability=plan.shortfall_probability,
            replacement_s=plan.noticed_after_s + 10.0,
            owner_share=plan.owner_share,
            region_mbps=dict(plan.region_mbps),
            budget_per_hour=float("inf") if plan.budget_per_hour is None else plan.budget_per_hour,
            hysteresis=plan.hysteresis,
            spare_share=plan.spare_share,
            exact_up_to=plan.exact_up_to,
        )


def shipped_scenarios() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_scenario(source: str | Path) -> Scenario:
    """A file, or a shipped scenario by its name. Raises `ScenarioError`."""
    path = Path(source)
    if not path.is_file() and str(source) in shipped_scenarios():
        path = SHIPPED / f"{source}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(shipped_scenarios())
        raise ScenarioError(
            f"{path}: cannot be read ({error.strerror}); shipped scenarios: {known}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from error
    return parse_scenario(values, str(path))


def parse_scenario(values: dict[str, object], where: str) -> Scenario:
    """Validate plain values. Raises `ScenarioError` naming `where`, the key and the problem."""
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        problem = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise ScenarioError(f"{where}: {key}: {problem}") from error
