"""From a table of offers and a run to a plan: times from links, what it costs, and what other settings would
cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnode.scheduler.activation import Plan, make_plan
from swarmnode.scheduler.broadcast import MBIT, Link, broadcast_from_totals
from swarmnode.scheduler.capacity import Demand, Timing
from swarmnode.scheduler.offers import WorkerOffer, traffic_mbps
from swarmnode.scheduler.offers_csv import OfferRow
from swarmnode.scheduler.settings import PlanSettings

MAX_ROUNDS = 4
BYTES_PER_TOKEN = 8.0
"""A token's id and log-prob in a group."""


LENGTH_SPREAD = 0.4
"""Relative deviation of a group's time, until it is measured: answers differ in length."""


@dataclass(frozen=True)
class Run:
    """What is trained, as far as it costs."""

    demand: Demand
    group_size: int = 8
    completion_tokens: float = 1000.0
    """Mean length of one completion."""
    version_bytes: float = 500e6
    """What a worker fetches for a new version: a delta, or a snapshot."""
    source_upload_mbps: float = 1000.0
    load_s: float = 2.0
    """From having a version to generating with it."""
    learner_price_per_hour: float = 0.0

    @property
    def tokens_per_group(self) -> float:
        return self.group_size * self.completion_tokens

    @property
    def tokens_per_update(self) -> float:
        return self.demand.batch_groups * self.tokens_per_group


@dataclass(frozen=True)
class Economics:
    """What a plan costs, the learner included."""

    cost_per_hour: float
    update_s: float
    dollars_per_update: float
    dollars_per_million_tokens: float
    """Of the completions that updates consume."""


@dataclass(frozen=True)
class Planned:
    demand: Demand
    plan: Plan
    offers: list[WorkerOffer]
    """As the plan saw them, with the broadcast times of its own size."""
    economics: Economics


def plan_rows(rows: Sequence[OfferRow], run: Run, settings: PlanSettings) -> Planned:
    """Plan for these offers.

    How long a broadcast takes depends on who receives it, and who is chosen depends on that: planned again
    for the receivers of the plan before, until that changes nothing.
    """
    receivers = list(rows)
    best: Planned | None = None
    for _ in range(MAX_ROUNDS):
        offers = worker_offers(rows, run, receivers)
        plan = make_plan(offers, run.demand, settings)
        planned = Planned(run.demand, plan, offers, economics(plan, run))
        if best is not None and plan.active == best.plan.active:
            return planned
        best = planned
        called = {*plan.active, *plan.spares}
        receivers = [row for row, offer in zip(rows, offers, strict=True) if offer.worker in called]
    assert best is not None
    return best


def worker_offers(rows: Sequence[OfferRow], run: Run, receivers: Sequence[OfferRow]) -> list[WorkerOffer]:
    """Offers with the times that follow from links when a version goes to `receivers`."""
    broadcast = broadcast_from_totals(
        run.version_bytes,
        run.source_upload_mbps,
        receivers=len(receivers),
        serving_mbps=sum(row.upload_mbps for row in receivers),
    )
    group_bytes = run.tokens_per_group * BYTES_PER_TOKEN
    offers = []
    for number, row in enumerate(rows):
        rate = row.groups_per_s(run.tokens_per_group)
        round_trip_s = row.round_trip_ms / 1000
        upload_s = group_bytes / (row.upload_mbps * MBIT) if row.upload_mbps > 0 else math.inf
        generation_s = row.groups_in_hand / rate if rate > 0 else math.inf
        link = Link(row.upload_mbps, row.download_mbps, round_trip_s)
        timing = Timing(
            groups_per_s=rate,
            broadcast_s=broadcast.seconds(link) + run.load_s,
            latency_s=generation_s + upload_s + round_trip_s,
            latency_deviation_s=LENGTH_SPREAD * generation_s if math.isfinite(generation_s) else 0.0,
        )
        offers.append(
            WorkerOffer(
                worker=number.to_bytes(8, "big"),
                timing=timing,
                name=row.name,
                owner=row.owner,
                region=row.region,
                device=row.device,
                memory_gb=row.memory_gb,
                price_per_hour=row.price_per_hour,
                presence=row.presence,
                departures_per_hour=row.departures_per_hour,
                traffic_mbps=traffic_mbps(
                    run.demand, timing, version_bytes=run.version_bytes, group_bytes=group_bytes
                ),
                available_for_s=3600 * row.available_for_h,
            )
        )
    return offers


def economics(plan: Plan, run: Run) -> Economics:
    """What updates and tokens cost at the pace that the plan is expected to keep."""
    cost = plan.cost_per_hour + run.learner_price_per_hour
    update_s = plan.assessment.period_s
    per_update = cost * update_s / 3600 if math.isfinite(update_s) else math.inf
    return Economics(cost, update_s, per_update, per_update / run.tokens_per_update * 1e6)


def sensitivity_to_staleness(
    rows: Sequence[OfferRow], run: Run, settings: PlanSettings, bounds: Sequence[int]
) -> list[tuple[int, Planned]]:
    """Plans for other bounds S, each with its own κ unless the run fixes one that fits."""
    planned = []
    for bound in bounds:
        fixed = run.demand.publish_every
        kappa = None if fixed is None or fixed > bound + 1 else fixed
        demand = replace(run.demand, max_staleness=bound, publish_every=kappa)
        planned.append((bound, plan_rows(rows, replace(run, demand=demand), settings)))
    return planned


def sensitivity_to_bandwidth(
    rows: Sequence[OfferRow], run: Run, settings: PlanSettings, factors: Sequence[float]
) -> list[tuple[float, Planned]]:
    """Plans with all links slower or faster by a factor."""
    planned = []
    for factor in factors:
        scaled = [
            replace(row, upload_mbps=row.upload_mbps * factor, download_mbps=row.download_mbps * factor)
            for row in rows
        ]
        source = replace(run, source_upload_mbps=run.source_upload_mbps * factor)
        links = {name: limit * factor for name, limit in settings.region_mbps.items()}
        planned.append((factor, plan_rows(scaled, source, replace(settings, region_mbps=links))))
    return planned
