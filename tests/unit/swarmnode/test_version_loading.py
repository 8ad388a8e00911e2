"""What the rollout process is given to load: by deltas where it can, from the file where it must, and after a
crash; and which groups wait."""

from typing import Any

from swarmnode.runtime.version_loading import VersionLoading
from tests.unit.swarmnode.stored_versions import stored


def loads(loading: VersionLoading) -> tuple[int, str | list[int]] | None:
    """The next load: the version, and its file or the versions of its deltas."""
    message = loading.next_load()
    if message is None:
        return None
    return message["version"], message["path"] or [delta["version"] for delta in message["deltas"]]


def done(loading: VersionLoading, version: int, way: str = "file", obstacle: str | None = None) -> None:
    message: dict[str, Any] = {"version": version, "way": way, "patch_obstacle": obstacle}
    loading.on_loaded(message)


def at_version(version: int, obstacle: str | None = None) -> VersionLoading:
    loading = VersionLoading()
    loading.offer(stored(version))
    assert loads(loading) == (version, f"/v{version}/weights")
    done(loading, version, obstacle=obstacle)
    return loading


def test_a_chain_of_deltas_is_loaded_at_once() -> None:
    loading = at_version(0)
    for version in (1, 2, 3):
        loading.offer(stored(version, parent=version - 1, has_file=False))
        if version == 1:
            assert loads(loading) == (1, [1])
    assert loads(loading) is None, "one at a time"
    done(loading, 1, "deltas")
    assert loads(loading) == (3, [2, 3])


def test_deltas_come_before_a_file_that_is_there_too() -> None:
    loading = at_version(0)
    loading.offer(stored(1, parent=0))
    assert loads(loading) == (1, [1])


def test_a_missing_link_or_an_engine_that_cannot_patch_waits_for_the_file() -> None:
    for loading in (at_version(0), at_version(1, obstacle="is F32 in the file")):
        loading.offer(stored(2, parent=1, has_file=False))
        assert loads(loading) is None
        loading.offer(stored(2, parent=1))
        assert loads(loading) == (2, "/v2/weights")


def test_deltas_for_other_weights_of_the_same_number_are_not_given() -> None:
    loading = at_version(1)
    other = stored(2, parent=0, has_file=False)
    delta = other.manifest.delta
    assert delta is not None
    changed = other.manifest.model_copy(update={"delta": delta.model_copy(update={"parent": 1})})
    loading.offer(type(other)(changed, other.envelope, other.state, None, other.delta_path))
    assert loads(loading) is None


def test_what_failed_by_deltas_is_loaded_from_its_file_and_then_not_again() -> None:
    loading = at_version(0)
    loading.offer(stored(1, parent=0, has_file=False))
    assert loads(loading) == (1, [1])
    loading.on_failed({"version": 1, "way": "deltas"})
    assert loads(loading) is None
    loading.offer(stored(1, parent=0))
    assert loads(loading) == (1, "/v1/weights")
    loading.on_failed({"version": 1, "way": "file"})
    assert loads(loading) is None
    loading.offer(stored(2, parent=1, has_file=False))
    assert loads(loading) == (2, [1, 2])


def test_after_a_crash_the_newest_file_is_loaded_and_then_the_deltas_on_it() -> None:
    loading = at_version(0)
    loading.offer(stored(1, parent=0))
    assert loads(loading) == (1, [1])
    done(loading, 1, "deltas")
    loading.offer(stored(2, parent=1, has_file=False))
    assert loads(loading) == (2, [2])
    loading.on_process_down()
    assert loads(loading) == (1, "/v1/weights")
    done(loading, 1)
    assert loads(loading) == (2, [2])


def test_groups_wait_only_for_versions_that_came_by_deltas_and_are_not_verified() -> None:
    loading = at_version(0)
    assert loading.verdict(0) == "send"
    loading.offer(stored(1, parent=0, has_file=False))
    assert loads(loading) == (1, [1])
    assert loading.verdict(1) == "send", "it is not loaded yet, so nothing comes from it"
    loading.offer(stored(1, parent=0))
    done(loading, 1, "deltas")
    assert loading.verdict(1) == "send", "verified while it was being loaded"
    loading.offer(stored(2, parent=1, has_file=False))
    assert loads(loading) == (2, [2])
    done(loading, 2, "deltas")
    assert (loading.verdict(1), loading.verdict(2)) == ("send", "hold")
    loading.offer(stored(2, parent=1))
    assert loading.verdict(2) == "send"


def test_a_load_that_is_withdrawn_under_way_is_not_trusted() -> None:
    loading = at_version(1)
    loading.offer(stored(2, parent=1, has_file=False))
    assert loads(loading) == (2, [2])
    loading.withdraw([2])
    assert loading.loaded == 1 and not loading.runs_withdrawn
    done(loading, 2, "deltas")
    assert loading.loaded is None and loading.runs_withdrawn
    assert loads(loading) == (1, "/v1/weights")
    done(loading, 1)
    assert loading.loaded == 1 and not loading.runs_withdrawn
