"""Run specs: what no node could follow is refused, and the run id is the hash of all of it."""

import hashlib
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.messages import SamplingContract
from protocol.run_spec import (
    MAX_GROUP_ARRAY_BYTES,
    AdapterSpec,
    AlgorithmSpec,
    Asset,
    BaseModelRef,
    RunSpec,
    TrustRules,
    WeightsFile,
)
from protocol.tasks import TaskSpec

KEY = bytes(range(32))


def changed(spec: RunSpec, **changes: Any) -> RunSpec:
    return RunSpec.model_validate(dict(spec) | changes)


def test_the_run_id_is_the_hash_of_the_encoded_spec(spec: RunSpec) -> None:
    assert spec.run_id == hashlib.sha256(b"swarmnode/1 run\x00" + spec.encode()).digest()
    assert RunSpec.decode(spec.encode()).run_id == spec.run_id


def test_the_run_id_of_a_fixed_spec(spec: RunSpec) -> None:
    assert spec.run_id.hex() == "a88cce8d9bb40025eb0603879160bf2005dd8f1a40f5fbece1b1313e10076cc2"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "another"},
        {"nonce": b"m" * 16},
        {"max_staleness": 3},
        {"local_groups": 17},
        {"pacing_batches": 3},
        {"partial_credit": True},
        {"publish_every": 2},
        {"learners": [KEY, b"k" * 32]},
        {"algorithm": AlgorithmSpec(learning_rate=2e-6)},
        {"trust": TrustRules(reward_tolerance=0.5)},
        {"model": BaseModelRef(name="tiny2", assets=[])},
        {"sampling": SamplingContract(max_new_tokens=5, group_size=2)},
        {"tasks": [TaskSpec(environment="e", name="n")]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whoever_changes_anything_has_another_run(spec: RunSpec, changes: dict[str, Any]) -> None:
    assert changed(spec, **changes).run_id != spec.run_id


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "sequential"}, "max_staleness = 0"),
        ({"learners": []}, "learner"),
        ({"external_groups": 1}, "external_groups must be 0"),
        ({"tasks": []}, "at least 1"),
        (
            {"tasks": [TaskSpec(environment="e", name="n"), TaskSpec(environment="e", name="n", weight=2.0)]},
            "same",
        ),
        ({"publish_every": 4}, "max_staleness \\+ 1"),
        ({"sampling": SamplingContract(top_p=0.9)}, "untruncated"),
        ({"sampling": SamplingContract(top_k=50)}, "untruncated"),
        ({"sampling": SamplingContract(seeded=False)}, "require_seeded"),
        ({"sampling": SamplingContract(group_size=64, max_new_tokens=32_768)}, "at most"),
        ({"max_staleness": -1}, "greater"),
        ({"local_groups": 0}, "greater"),
        ({"pacing_batches": 0}, "greater"),
        ({"nonce": b"short"}, "16"),
        ({"preset": "herd"}, "fleet"),
        ({"learners": [b"short"]}, "32"),
        ({"name": "bell\a"}, "pattern"),
    ],
)
def test_a_run_that_cannot_work_is_refused_and_the_message_says_why(
    spec: RunSpec, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        changed(spec, **changes)


def test_runs_at_the_edge_of_the_rules(spec: RunSpec) -> None:
    changed(spec, mode="sequential", max_staleness=0)
    changed(spec, publish_every=3)
    changed(spec, preset="swarm", learners=[], external_groups=4)
    changed(spec, trust=TrustRules(require_seeded=False), sampling=SamplingContract(seeded=False))
    changed(spec, sampling=SamplingContract(group_size=64, max_new_tokens=MAX_GROUP_ARRAY_BYTES // 8 // 64))


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "../x.json", "a/b.json", "/etc/x.json", ".hidden.json", "-x.json", "a\\b.json"),
        *("a.json\n", "x.json\x00", "x.PY.json/..", "a b.json", "é.json", "a" * 200 + ".json"),
        *("config", "model.py", "pytorch_model.bin", "model.safetensors", "x.pkl"),
    ],
)
def test_an_asset_is_a_plain_data_file(path: str) -> None:
    with pytest.raises(ValidationError):
        Asset(path=path, size_bytes=0, chunks=[])


@pytest.mark.parametrize(
    "path",
    ["config.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "model.safetensors.index.json"],
)
def test_the_files_of_a_model_folder_are_assets(path: str) -> None:
    assert Asset(path=path, size_bytes=0, chunks=[]).path == path


def test_assets_name_as_many_chunks_as_they_need_and_no_path_twice() -> None:
    def model(*assets: Asset) -> BaseModelRef:
        return BaseModelRef(name="m", assets=list(assets), chunk_size=10)

    model(
        Asset(path="a.json", size_bytes=11, chunks=[KEY, KEY]), Asset(path="b.json", size_bytes=0, chunks=[])
    )
    with pytest.raises(ValidationError, match=r"a\.json: 1 chunks named, 2 needed"):
        model(Asset(path="a.json", size_bytes=11, chunks=[KEY]))
    with pytest.raises(ValidationError, match="same path"):
        model(*[Asset(path="a.json", size_bytes=1, chunks=[KEY])] * 2)


def test_weights_of_the_base_model_are_safetensors_files_in_their_chunks() -> None:
    def weights(path: str = "model.safetensors", size: int = 11, count: int = 2) -> BaseModelRef:
        file = WeightsFile(path=path, size_bytes=size, chunks=[KEY] * count)
        return BaseModelRef(name="m", assets=[], weights=[file], chunk_size=10)

    assert [file.path for file in weights().files] == ["model.safetensors"]
    weights("model-00001-of-00002.safetensors")
    for path in ("model.bin", "model.pt", "../model.safetensors", "a/b.safetensors", "config.json"):
        with pytest.raises(ValidationError, match="pattern"):
            weights(path)
    with pytest.raises(ValidationError, match=r"model\.safetensors: 3 chunks named, 2 needed"):
        weights(count=3)
    file = WeightsFile(path="model.safetensors", size_bytes=1, chunks=[KEY])
    with pytest.raises(ValidationError, match="same path"):
        BaseModelRef(name="m", assets=[], weights=[file, file])
    half = WeightsFile(path="a.safetensors", size_bytes=600_000, chunks=[KEY] * 60_000)
    with pytest.raises(ValidationError, match="use larger chunks"):
        BaseModelRef(
            name="m",
            assets=[],
            weights=[half, half.model_copy(update={"path": "b.safetensors"})],
            chunk_size=10,
        )


def test_who_may_publish(spec: RunSpec) -> None:
    assert spec.may_publish(KEY)
    assert not spec.may_publish(b"k" * 32)
    open_swarm = changed(spec, preset="swarm", learners=[])
    assert open_swarm.may_publish(b"k" * 32)


def test_an_adapter_is_part_of_the_run_and_needs_its_base_model(spec: RunSpec) -> None:
    file = WeightsFile(path="model.safetensors", size_bytes=1, chunks=[bytes(32)])
    with_weights = changed(spec, model=BaseModelRef(name="tiny", assets=[], weights=[file]))
    adapted = changed(with_weights, adapter=AdapterSpec(r=4))
    assert len({with_weights.run_id, adapted.run_id, changed(adapted, adapter=AdapterSpec(r=8)).run_id}) == 3
    assert RunSpec.decode(adapted.encode()) == adapted
    with pytest.raises(ValidationError, match="needs its base model"):
        changed(spec, adapter=AdapterSpec())


@pytest.mark.parametrize(
    "bad",
    [
        {"r": 0},
        {"alpha": 0.0},
        {"target_modules": []},
        {"target_modules": ["q_proj", "q_proj"]},
        {"target_modules": ["q_proj|.*"]},
        {"target_modules": ["a..b"]},
        {"dropout": 0.1},
    ],
)
def test_adapters_that_nobody_could_make_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AdapterSpec(**bad)
