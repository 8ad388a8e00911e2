"""The files of a run's base model: which ones travel, and whether a folder holds exactly these."""

import json
from pathlib import Path

from protocol import limits
from protocol.chunks import chunk_hash
from protocol.run_spec import Asset, BaseModelRef, WeightsFile
from swarmnode.runtime.version_store import WEIGHTS_NAME, is_intact

INDEX_NAME = WEIGHTS_NAME + ".index.json"
LARGE_BYTES = 32 * 1024**3
"""Weights from this size on are cut into the largest chunks: their hashes must fit the run's description."""


def base_model(name: str, model_path: Path, *, with_weights: bool) -> BaseModelRef:
    """What a run says of its base model. Raises `ValueError` when it is unclear which are its weights."""
    weights = weights_paths(model_path) if with_weights else []
    size = sum(path.stat().st_size for path in weights)
    chunk_size = limits.DEFAULT_CHUNK_BYTES if size < LARGE_BYTES else limits.MAX_CHUNK_BYTES
    return BaseModelRef(
        name=name,
        assets=[
            Asset(path=path.name, size_bytes=path.stat().st_size, chunks=hash_chunks(path, chunk_size))
            for path in asset_paths(model_path)
            if with_weights or path.name != INDEX_NAME
        ],
        weights=[
            WeightsFile(path=path.name, size_bytes=path.stat().st_size, chunks=hash_chunks(path, chunk_size))
            for path in weights
        ],
        chunk_size=chunk_size,
    )


def asset_paths(model_path: Path) -> list[Path]:
    """The files beside the weights that a node needs to run the model: configuration, tokenizer, template."""
    return sorted(
        path
        for path in model_path.iterdir()
        if path.is_file()
        and path.suffix in {".json", ".jinja", ".model", ".txt"}
        and path.name != "README.txt"
        and (not path.name.endswith(".index.json") or path.name == INDEX_NAME)
    )


def weights_paths(model_path: Path) -> list[Path]:
    """The safetensors files that hold the model. Raises `ValueError`."""
    index = model_path / INDEX_NAME
    if (model_path / WEIGHTS_NAME).is_file():
        names = [WEIGHTS_NAME]
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [path.name for path in model_path.glob("*.safetensors")]
        if len(names) != 1:
            raise ValueError(f"{model_path}: {len(names)} .safetensors files and no {INDEX_NAME}")
    missing = [name for name in names if not (model_path / name).is_file()]
    if missing:
        raise ValueError(f"{model_path} lacks {missing[0]}, which its index names")
    return [model_path / name for name in names]


def model_matches(model_path: Path, model: BaseModelRef, *, weights: bool = True) -> bool:
    """Whether a folder holds exactly the files of a run's model, or those beside its weights."""
    return all(
        is_intact(model_path / file.path, file.size_bytes, model.chunk_size, file.chunks)
        for file in (model.files if weights else model.assets)
    )


def hash_chunks(path: Path, chunk_size: int) -> list[bytes]:
    """SHA-256 of each chunk of a file, which is read one chunk at a time."""
    hashes = []
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(chunk_size):
            hashes.append(chunk_hash(chunk))
    return hashes
