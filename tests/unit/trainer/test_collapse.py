"""When training halts: figures below their floor for several updates in a row, and what counts as good."""

from trainer.collapse import CollapseWatch, HaltRules

GOOD = {"token_ess_ratio": 0.9, "entropy": 0.5}
LOST = {"token_ess_ratio": 0.05, "entropy": 0.5}
MUTE = {"token_ess_ratio": 0.9, "entropy": 1e-4}


def test_it_takes_several_updates_in_a_row_below_one_floor() -> None:
    watch = CollapseWatch(HaltRules(halt_after=3))
    for version, measured in enumerate([GOOD, LOST, LOST, GOOD, LOST, MUTE, LOST]):
        assert watch.observe(version, measured) is None
    assert watch.last_good == 3 and watch.is_suspicious
    assert watch.observe(7, LOST) is None
    reason = watch.observe(8, LOST)
    assert reason == "token_ess_ratio was below 0.1 for 3 updates, at last 0.05"
    assert watch.last_good == 3


def test_each_floor_counts_alone_and_names_itself() -> None:
    watch = CollapseWatch(HaltRules(halt_after=2))
    assert watch.observe(0, MUTE) is None
    reason = watch.observe(1, MUTE)
    assert reason is not None and reason.startswith("entropy was below 0.001 for 2 updates")
    # Nothing was ever above both floors: the version that training began with is what there is.
    assert watch.last_good == 0


def test_a_floor_of_zero_watches_nothing() -> None:
    watch = CollapseWatch(HaltRules(min_ess=0.0, min_entropy=0.0, halt_after=1))
    assert watch.observe(0, {"token_ess_ratio": 0.0, "entropy": 0.0}) is None
    assert watch.last_good == 0 and not watch.is_suspicious


def test_after_a_roll_back_counting_begins_anew() -> None:
    watch = CollapseWatch(HaltRules(halt_after=2))
    watch.observe(0, GOOD)
    watch.observe(1, LOST)
    watch.forgive(9)
    assert watch.last_good == 9 and not watch.is_suspicious
    assert watch.observe(9, LOST) is None
