"""From a table to a plan: times from links, money, and what other settings would cost."""

from dataclasses import replace

import pytest

from swarmnode.scheduler.broadcast import Link, plan_broadcast
from swarmnode.scheduler.capacity import Demand
from swarmnode.scheduler.offers_csv import OfferRow
from swarmnode.scheduler.planning import (
    Run,
    economics,
    plan_rows,
    sensitivity_to_bandwidth,
    sensitivity_to_staleness,
    worker_offers,
)
from swarmnode.scheduler.settings import PlanSettings

RUN = Run(
    Demand(batch_groups=60, train_s=60.0, max_staleness=6),
    group_size=4,
    completion_tokens=250,
    version_bytes=125e6,
    source_upload_mbps=100.0,
    load_s=1.0,
    learner_price_per_hour=3.0,
)
ROWS = [
    OfferRow(f"w{i:02}", 0.5 + 0.01 * i, groups_per_min=6, upload_mbps=100, download_mbps=400)
    for i in range(40)
]


def test_a_broadcast_is_bounded_by_source_all_uplinks_and_own_line() -> None:
    # 125 MB are 1,000 Mbit: 10 s from the source at 100 Mbit/s; all together 9 · 1,000 / (100 + 9 · 50).
    many = [Link(50, 400)] * 9
    broadcast = plan_broadcast(125e6, 100.0, many, overhead=1.0)
    assert broadcast.swarm_s == pytest.approx(9000 / 550)
    assert broadcast.seconds(Link(50, 400)) == pytest.approx(9000 / 550)
    assert broadcast.seconds(Link(50, 20, 0.1)) == pytest.approx(50.1)
    assert plan_broadcast(125e6, 100.0, [Link(500, 400)] * 9, overhead=1.0).swarm_s == pytest.approx(10.0)
    silent = [Link(50, 400, serves=False)] * 9
    assert plan_broadcast(125e6, 100.0, silent, overhead=1.0).swarm_s == pytest.approx(90.0)
    assert plan_broadcast(125e6, 100.0, []).swarm_s == 0.0


def test_times_of_a_worker_follow_from_its_line() -> None:
    (offer,) = worker_offers(ROWS[:1], RUN, ROWS[:1])
    # 1,000 Mbit from a source of 100 Mbit/s, stretched by 1.15, half a tenth of a second and a second to
    # load.
    assert offer.timing.broadcast_s == pytest.approx(1.15 * 10 + 0.05 + 1.0)
    # 8 groups in hand at 0.1 per second, then 1,000 tokens of 8 bytes at 100 Mbit/s.
    assert offer.timing.latency_s == pytest.approx(80 + 8000 / 12.5e6 + 0.05)


def test_money_is_that_of_workers_and_learner_over_updates_and_tokens() -> None:
    planned = plan_rows(ROWS, RUN, PlanSettings())
    assert planned.plan.is_enough
    money = economics(planned.plan, RUN)
    assert money.update_s == 60.0
    assert money.cost_per_hour == pytest.approx(planned.plan.cost_per_hour + 3.0)
    assert money.dollars_per_update == pytest.approx(money.cost_per_hour / 60)
    # 60 groups of 4 completions of 250 tokens.
    assert money.dollars_per_million_tokens == pytest.approx(money.dollars_per_update / 0.06)


def test_more_staleness_or_bandwidth_never_costs_more_workers() -> None:
    settings = PlanSettings(hysteresis=0.0)
    by_staleness = sensitivity_to_staleness(ROWS, RUN, settings, (3, 4, 6, 11))
    workers = [len(planned.plan.active) for _, planned in by_staleness]
    assert workers == sorted(workers, reverse=True)
    assert [planned.demand.kappa for _, planned in by_staleness] == [2, 3, 5, 10]
    by_bandwidth = sensitivity_to_bandwidth(ROWS, RUN, settings, (0.25, 1.0, 4.0))
    workers = [len(planned.plan.active) for _, planned in by_bandwidth]
    assert workers == sorted(workers, reverse=True)


def test_a_fixed_publication_period_stays_while_it_fits_the_bound() -> None:
    run = replace(RUN, demand=replace(RUN.demand, publish_every=4))
    planned = sensitivity_to_staleness(ROWS, run, PlanSettings(), (2, 6))
    assert [one.demand.kappa for _, one in planned] == [1, 4]
