"""Plans: who works, who waits, when nothing changes, when everything does."""

import math
from dataclasses import replace

import pytest

from swarmnode.scheduler.activation import make_plan, may_drain, replan_reason, stand_ins
from swarmnode.scheduler.capacity import Demand, Timing
from swarmnode.scheduler.offers import WorkerOffer, traffic_mbps
from swarmnode.scheduler.settings import PlanSettings

DEMAND = Demand(batch_groups=100, train_s=10.0, max_staleness=6)
"""Ten groups per second."""
CALM = PlanSettings(replacement_s=0.0)


def offer(name: str, price: float, rate: float = 1.0, **more: object) -> WorkerOffer:
    return WorkerOffer(
        worker=name.encode(),
        name=name,
        timing=Timing(rate, broadcast_s=0.0, latency_s=0.0),
        price_per_hour=price,
        **({"rate_spread": 0.0} | more),  # type: ignore[arg-type]
    )


def names(workers: tuple[bytes, ...]) -> list[str]:
    return sorted(worker.decode() for worker in workers)


def test_the_cheapest_that_suffice_are_active_and_no_more() -> None:
    offers = [offer(f"w{i:02}", 1.0 + i) for i in range(20)]
    plan = make_plan(offers, DEMAND, CALM)
    assert names(plan.active) == [f"w{i:02}" for i in range(10)]
    assert plan.is_enough and plan.cost_per_hour == pytest.approx(sum(range(1, 11)))
    assert plan.assessment.ratio == pytest.approx(1.0)
    assert plan.method == "exact"
    assert names(plan.spares) == ["w10"]
    assert "active ones cost up to" in plan.reasons[b"w15"]


def test_price_counts_per_group_that_counts_not_per_hour() -> None:
    # Slow links: of a cycle of 50 s the far workers lose 30.
    far = [replace(offer(f"far{i}", 1.0), timing=Timing(1.0, 30.0)) for i in range(30)]
    near = [offer(f"near{i}", 1.6) for i in range(10)]
    plan = make_plan([*far, *near], DEMAND, CALM)
    assert all(name.startswith("near") for name in names(plan.active)), "1.6 beats 1.0 / 0.4"


def test_unreliable_workers_are_bought_with_a_margin() -> None:
    shaky = [offer(f"w{i:02}", 1.0, presence=0.9) for i in range(40)]
    plan = make_plan(shaky, DEMAND, PlanSettings(shortfall_probability=0.05, replacement_s=0.0))
    # P(fewer than 10 of n are there) with 0.9 each: 0.0982 for 12, 0.0342 for 13.
    assert len(plan.active) == 13
    assert plan.shortfall_probability == pytest.approx(0.034, abs=0.003)


def test_a_worker_likely_to_leave_is_worth_less() -> None:
    hasty = [offer(f"hasty{i:02}", 1.0, departures_per_hour=60.0) for i in range(40)]
    steady = [offer(f"steady{i:02}", 1.5) for i in range(10)]
    plan = make_plan([*hasty, *steady], DEMAND, PlanSettings(replacement_s=60.0))
    # Only exp(−1) of the hasty are still there after the minute that a replacement takes.
    assert all(name.startswith("steady") for name in names(plan.active))


def test_no_owner_gets_more_than_its_share() -> None:
    cheap = [offer(f"big{i:02}", 0.1, owner="big") for i in range(20)]
    dear = [offer(f"w{i:02}", 5.0) for i in range(20)]
    plan = make_plan([*cheap, *dear], DEMAND, replace(CALM, owner_share=0.3))
    assert sum(name.startswith("big") for name in names(plan.active)) == 3
    assert len(plan.active) == 10


def test_a_regions_link_is_not_overbooked() -> None:
    near = [offer(f"near{i:02}", 0.1, region="near", traffic_mbps=20.0) for i in range(20)]
    far = [offer(f"far{i:02}", 5.0, region="far", traffic_mbps=20.0) for i in range(20)]
    plan = make_plan([*near, *far], DEMAND, replace(CALM, region_mbps={"near": 85.0}))
    assert sum(name.startswith("near") for name in names(plan.active)) == 4
    assert plan.is_enough


def test_the_budget_holds_and_the_plan_says_that_it_is_not_enough() -> None:
    offers = [offer(f"w{i:02}", 1.0) for i in range(20)]
    plan = make_plan(offers, DEMAND, replace(CALM, budget_per_hour=7.5))
    assert len(plan.active) == 7 and plan.cost_per_hour <= 7.5
    assert not plan.is_enough and plan.limits == ("budget",)
    assert plan.assessment.utilization == pytest.approx(0.7)
    short = make_plan(offers[:5], DEMAND, CALM)
    assert short.limits == ("offers",) and len(short.active) == 5


def test_draining_workers_are_paid_out_of_the_same_budget() -> None:
    offers = [offer(f"w{i:02}", 1.0) for i in range(20)]
    plan = make_plan(offers, DEMAND, replace(CALM, budget_per_hour=12.0), draining={b"w18", b"w19"})
    assert plan.cost_per_hour == pytest.approx(10.0)
    tight = make_plan(offers, DEMAND, replace(CALM, budget_per_hour=11.0), draining={b"w18", b"w19"})
    assert tight.cost_per_hour <= 9.0


def test_what_cannot_help_is_left_out_with_its_reason() -> None:
    offers = [
        *(offer(f"w{i:02}", 1.0) for i in range(12)),
        offer("closing", 0.1, available_for_s=60.0),
        offer("small", 0.1, memory_gb=8.0),
        offer("silent", 0.1, rate=0.0),
        offer("costly", 99.0),
        replace(offer("remote", 0.1), timing=Timing(1.0, broadcast_s=90.0)),
    ]
    settings = replace(CALM, least_memory_gb=16.0, budget_per_hour=50.0)
    plan = make_plan(offers, DEMAND, settings)
    assert set(names(plan.active)) <= {f"w{i:02}" for i in range(12)}
    assert "60 s more" in plan.reasons[b"closing"]
    assert "16 are needed" in plan.reasons[b"small"]
    assert "no measured rate" in plan.reasons[b"silent"]
    assert "above the budget" in plan.reasons[b"costly"]
    assert "too stale" in plan.reasons[b"remote"]


def test_volunteers_come_first_and_fast_ones_before_many_slow_ones() -> None:
    offers = [
        *(offer(f"slow{i:02}", 0.0, rate=0.5) for i in range(40)),
        *(offer(f"fast{i:02}", 0.0, rate=2.0) for i in range(5)),
        *(offer(f"paid{i:02}", 0.5, rate=5.0) for i in range(5)),
    ]
    plan = make_plan(offers, DEMAND, CALM)
    assert plan.cost_per_hour == 0.0
    assert names(plan.active) == [f"fast{i:02}" for i in range(5)]


def test_what_is_active_stays_while_a_change_would_save_little() -> None:
    offers = [offer(f"w{i:02}", 1.0 + 0.001 * i) for i in range(20)]
    active = {f"w{i:02}".encode() for i in range(10, 20)}
    plan = make_plan(offers, DEMAND, CALM, active=active)
    assert set(plan.active) == active and plan.method == "kept" and not plan.draining
    offers = [offer(f"w{i:02}", 1.0 if i >= 10 else 0.5) for i in range(20)]
    plan = make_plan(offers, DEMAND, CALM, active=active)
    assert names(plan.active) == [f"w{i:02}" for i in range(10)]
    assert set(plan.draining) == active


def test_who_left_is_replaced_and_the_others_stay() -> None:
    offers = [offer(f"w{i:02}", 1.0) for i in range(20) if i != 3]
    active = {f"w{i:02}".encode() for i in range(10)}
    plan = make_plan(offers, DEMAND, CALM, active=active)
    assert len(plan.active) == 10 and active - {b"w03"} < set(plan.active)
    assert plan.draining == (b"w03",)


def test_a_spare_can_stand_in_for_the_largest_worker() -> None:
    offers = [offer("large", 1.0, rate=6.0), *(offer(f"w{i:02}", 1.0) for i in range(20))]
    plan = make_plan(offers, DEMAND, CALM)
    assert b"large" in plan.active
    assert len(plan.spares) == 6
    assert not set(plan.spares) & set(plan.active)


def test_spares_are_called_in_order_for_what_was_lost_and_no_more() -> None:
    offers = [offer(f"w{i:02}", 1.0 + 0.01 * i) for i in range(20)]
    plan = make_plan(offers, DEMAND, replace(CALM, spare_share=0.5))
    spares = [f"w{i:02}".encode() for i in range(10, 15)]
    assert list(plan.spares) == spares
    everyone = set(plan.active)
    assert stand_ins(plan, everyone, set(spares)) == []
    assert stand_ins(plan, everyone - {b"w00", b"w07"}, set(spares)) == spares[:2]
    # One has no weights yet; then one more is lost than there are spares for.
    assert stand_ins(plan, everyone - {b"w00", b"w07"}, set(spares) - {b"w10"}) == spares[1:3]
    assert stand_ins(plan, set(), set(spares)) == spares


def test_who_goes_stays_until_who_comes_has_weights() -> None:
    offers = [offer(f"w{i:02}", 1.0 if i >= 10 else 0.5) for i in range(20)]
    before = {f"w{i:02}".encode() for i in range(10, 20)}
    plan = make_plan(offers, DEMAND, CALM, active=before)
    assert set(plan.draining) == before
    both = before | set(plan.active)
    assert may_drain(plan, both, before) == []
    assert may_drain(plan, both, before | {b"w00", b"w01", b"w02"}) == [b"w10", b"w11", b"w12"]
    assert set(may_drain(plan, both, both)) == before
    # One that has no weights itself makes nothing that could be missed.
    assert may_drain(plan, both, before - {b"w15"}) == []
    assert may_drain(plan, both, (before - {b"w15"}) | {b"w00"}) == [b"w15"]


OFFERS = [offer(f"w{i:02}", 1.0 + 0.01 * i) for i in range(20)]


def test_nothing_changed_is_no_reason_to_plan_anew() -> None:
    plan = make_plan(OFFERS, DEMAND, CALM)
    assert replan_reason(plan, OFFERS, DEMAND, CALM) is None
    wobbling = [replace(one, price_per_hour=one.price_per_hour * 1.01) for one in OFFERS]
    assert replan_reason(plan, wobbling, DEMAND, CALM) is None


@pytest.mark.parametrize(
    ("offers", "demand", "settings", "reason"),
    [
        (OFFERS[1:], DEMAND, CALM, "left"),
        ([replace(OFFERS[0], timing=Timing(0.1)), *OFFERS[1:]], DEMAND, CALM, "fell below"),
        (OFFERS, replace(DEMAND, train_s=8.0), CALM, "fell below"),
        ([replace(o, price_per_hour=o.price_per_hour * 1.2) for o in OFFERS], DEMAND, CALM, "prices changed"),
        (OFFERS, DEMAND, replace(CALM, budget_per_hour=9.0), "budget"),
        ([*OFFERS, offer("bargain", 0.1, rate=3.0)], DEMAND, CALM, "cheaper"),
        (OFFERS, replace(DEMAND, train_s=20.0), CALM, "cheaper"),
        ([replace(OFFERS[0], available_for_s=10.0), *OFFERS[1:]], DEMAND, CALM, "can no longer be used"),
    ],
)
def test_reasons_to_plan_anew(
    offers: list[WorkerOffer], demand: Demand, settings: PlanSettings, reason: str
) -> None:
    plan = make_plan(OFFERS, DEMAND, CALM)
    said = replan_reason(plan, offers, demand, settings)
    assert said is not None and reason in said


def test_a_plan_that_cannot_be_enough_is_not_made_over_and_over() -> None:
    few = OFFERS[:5]
    plan = make_plan(few, DEMAND, CALM)
    assert not plan.is_enough
    assert replan_reason(plan, few, DEMAND, CALM) is None
    assert replan_reason(plan, OFFERS[:6], DEMAND, CALM) is not None


def test_no_offers_give_an_empty_plan() -> None:
    plan = make_plan([], DEMAND, CALM)
    assert plan.active == () and not plan.is_enough and plan.limits == ("offers",)
    assert plan.shortfall_probability == 1.0 and math.isinf(plan.assessment.period_s)


def test_traffic_is_versions_and_groups() -> None:
    # 50 MB every 50 s are 8 Mbit/s, a group of 100 kB per second 0.8.
    demand = Demand(10, 10.0, 6)
    timing = Timing(1.0, broadcast_s=25.0)
    got = traffic_mbps(demand, timing, version_bytes=50e6, group_bytes=1e5)
    assert got == pytest.approx(8 + 0.8)


@pytest.mark.parametrize("bad", [{"shortfall_probability": 0.0}, {"owner_share": 0.0}, {"hysteresis": -1.0}])
def test_settings_that_mean_nothing_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        PlanSettings(**bad)  # type: ignore[arg-type]
