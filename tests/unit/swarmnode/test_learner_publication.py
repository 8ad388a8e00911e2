"""What the learner process has written is signed, served and never given out under a number that was used."""

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.unit.swarmnode.role_parts import LearnerParts
from tests.unit.swarmnode.served_chunks import read_chunk, serves


@pytest.fixture
async def parts(tmp_path: Path, nursery: trio.Nursery):
    made = LearnerParts(tmp_path)
    made.verify_by(nursery)
    yield made
    made.store.store.close()


def with_delta(publication: dict[str, Any], content: bytes) -> dict[str, Any]:
    """The publication with a delta file from the version before."""
    path = Path(publication["path"]).with_name("delta.bin")
    path.write_bytes(content)
    delta = {
        "parent": publication["version"] - 1,
        "parent_state": b"p" * 32,
        "path": str(path),
        "size": len(content),
        "chunk_size": 4,
        "chunks": [bytes([number]) * 32 for number in range(-(-len(content) // 4))],
    }
    return publication | {"delta": delta}


async def ready(parts: LearnerParts, publication: dict[str, Any]) -> None:
    await parts.role.on_learner_message(
        {
            "type": "ready",
            "version": publication["version"],
            "consumed": {},
            "eval_before": None,
            "publication": publication,
        }
    )


async def test_a_delta_is_in_the_signed_manifest_and_served(parts: LearnerParts) -> None:
    publication = with_delta(parts.publication(1), b"delta!")
    await ready(parts, publication)
    stored = parts.role._versions.get(parts.role.policy, 1)
    assert stored is not None and stored.manifest.delta is not None
    delta = stored.manifest.delta
    assert (delta.parent, delta.parent_state, delta.size_bytes) == (0, b"p" * 32, 6)
    assert delta.chunks == [b"\0" * 32, b"\1" * 32]
    assert stored.envelope.sender == parts.role.policy
    shelf = parts.role._versions.shelf
    assert await read_chunk(shelf, b"\1" * 32) == b"a!"
    assert await read_chunk(shelf, publication["chunks"][0]) == b"weights 1"


async def test_a_version_that_is_out_already_keeps_its_manifest(parts: LearnerParts) -> None:
    publication = with_delta(parts.publication(1), b"delta!")
    await ready(parts, publication)
    first = parts.role._versions.get(parts.role.policy, 1)
    await ready(parts, publication)
    assert parts.role._versions.get(parts.role.policy, 1) == first
    assert parts.published == [1, 1]


async def test_a_version_published_again_with_another_delta_gets_a_new_manifest(parts: LearnerParts) -> None:
    await ready(parts, with_delta(parts.publication(1), b"delta!"))
    await ready(parts, parts.publication(1))
    stored = parts.role._versions.get(parts.role.policy, 1)
    assert stored is not None and stored.manifest.delta is None and stored.delta_path is None
    assert not serves(parts.role._versions.shelf, b"\1" * 32)
    assert serves(parts.role._versions.shelf, stored.manifest.chunks[0])


async def test_the_highest_number_given_out_survives_a_restart_of_the_node(
    tmp_path: Path, parts: LearnerParts
) -> None:
    assert parts.role.newest_published is None
    await parts.up(4)
    await parts.update(5, [])
    again = LearnerParts(tmp_path)
    await again.role.start()
    assert parts.role.newest_published == again.role.newest_published == 5
    again.store.store.close()
