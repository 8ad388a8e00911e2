"""Virtual time."""

from swarmnode.simulator.clock import EventQueue


def test_events_run_in_the_order_of_their_times_and_equal_times_in_that_of_their_scheduling() -> None:
    clock, seen, checks = EventQueue(), list[str](), list[float]()
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.after(1.0, lambda: clock.at(0.5, seen.append, "of the past, so now"))
    clock.at(9.0, seen.append, "never")
    clock.run(5.0, lambda: checks.append(clock.now))
    assert seen == ["first", "second", "of the past, so now", "late"]
    assert checks == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert clock.now == 5.0 and clock.handled == 5
