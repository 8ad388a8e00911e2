"""The files of a run's base model: which ones travel, and whether a folder holds exactly these."""

from pathlib import Path

from protocol.chunks import chunk_hash
from protocol.run_spec import Asset
from swarmnode.runtime.version_store import is_intact


def file_assets(model_path: Path, chunk_size: int) -> list[Asset]:
    """The files beside the weights that a node needs to run the model: configuration, tokenizer, template."""
    wanted = sorted(
        path
        for path in model_path.iterdir()
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and path.is_file()
    )
    return [
        Asset(path=path.name, size_bytes=path.stat().st_size, chunks=hash_chunks(path, chunk_size))
        for path in wanted
        if not path.name.endswith(".index.json") and path.name != "README.txt"
    ]


def assets_match(model_path: Path, assets: list[Asset], chunk_size: int) -> bool:
    """Whether a folder holds exactly these files."""
    return all(
        is_intact(model_path / asset.path, asset.size_bytes, chunk_size, asset.chunks) for asset in assets
    )


def hash_chunks(path: Path, chunk_size: int) -> list[bytes]:
    """SHA-256 of each chunk of a file, which is read one chunk at a time."""
    hashes = []
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(chunk_size):
            hashes.append(chunk_hash(chunk))
    return hashes
