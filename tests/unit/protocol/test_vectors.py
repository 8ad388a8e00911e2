"""The vectors that other implementations test against are what this code makes, and agree with each other."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from protocol.admission import check_group
from protocol.chunks import chunk_ranges
from protocol.delta import DeltaFile, encode_delta
from protocol.envelope import open_envelope
from protocol.identity import Identity
from protocol.invite import parse_invite
from protocol.messages import KINDS, RolloutGroup
from protocol.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "vectors"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_vectors", ROOT / "scripts" / "make_vectors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = load_script()


def vectors(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


@pytest.mark.parametrize("name", MAKE.FILES)
def test_the_code_reproduces_the_vectors(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == MAKE.render(name), (
        "run scripts/make_vectors.py if this is meant"
    )


def test_there_are_no_other_vectors() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(MAKE.FILES)


def test_every_kind_has_a_vector_whose_envelope_opens_to_its_body() -> None:
    entries = vectors("messages.json")
    assert {entry["kind"] for entry in entries} == {*KINDS, "run_spec"}
    for entry in entries:
        opened = open_envelope(bytes.fromhex(entry["envelope"]), run_id=bytes.fromhex(entry["run_id"]))
        assert opened.body.hex() == entry["body"]
        assert (opened.kind, opened.sequence) == (entry["kind"], entry["sequence"])
        assert opened.sender == Identity.from_seed(bytes.fromhex(entry["sender_seed"])).key


def test_the_group_of_the_vectors_would_be_accepted() -> None:
    run = vectors("run.json")
    spec = RunSpec.decode(bytes.fromhex(run["spec"]))
    assert spec.run_id.hex() == run["run_id"]
    group = RolloutGroup.decode(bytes.fromhex(run["group"]["body"]))
    sender = bytes.fromhex(run["group"]["sender"])
    check_group(
        group, spec, spec.run_id, sender, policy=spec.learners[0], learner_version=8, vocabulary_size=70_000
    )


def test_the_deltas_of_the_vectors_do_what_they_say_and_are_what_the_codec_finds() -> None:
    for entry in vectors("delta.json"):
        parent, snapshot = bytes.fromhex(entry["parent"]), bytes.fromhex(entry["snapshot"])
        theirs = DeltaFile(bytes.fromhex(entry["delta"]))
        ours = DeltaFile(b"".join(encode_delta(parent, snapshot, entry["chunk_size"])))
        assert theirs.chunk_count == ours.chunk_count == len(entry["changes"])
        for index, (start, end) in enumerate(chunk_ranges(len(parent), entry["chunk_size"])):
            chunk = bytearray(parent[start:end])
            theirs.apply(index, chunk)
            assert chunk == snapshot[start:end], entry["name"]
            for one, two in zip(theirs.changes(index), ours.changes(index), strict=True):
                assert one.offsets.tolist() == two.offsets.tolist()
                assert (one.low.tolist(), one.bits.tolist()) == (two.low.tolist(), two.bits.tolist())


def test_the_invites_of_the_vectors_can_be_read() -> None:
    for entry in vectors("invite.json"):
        invite = parse_invite(entry["invite"])
        assert (invite.run_id.hex(), invite.seeds) == (entry["run_id"], entry["seeds"])
