"""Which folder a run's `model` means: the tiny model of this package, a folder, or a Hugging Face hub id."""

import re
from pathlib import Path

TINY_MODEL_DIR = Path(__file__).parent / "tiny"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
"""Weights as safetensors only, no Python files: nothing of a model repository is ever run."""


class ModelNotFound(ValueError):
    """`model` names nothing that can be loaded. The message is one line that says what to do."""


def resolve_model(name_or_path: str | Path) -> Path:
    """The folder of a model: "tiny" is the one that ships here, a folder is itself, anything else a hub id.

    A hub id is looked for in the local cache first and downloaded if it is not there. Raises `ModelNotFound`.
    """
    name = str(name_or_path)
    if name == "tiny":
        return _checked(TINY_MODEL_DIR, name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path.resolve(), name)
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f'model {name!r} is neither "tiny", nor a folder, nor a hub id like "owner/name"')
    return _checked(_from_hub(name), name)


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"model {name!r}: {folder} has no config.json, so it is no Hugging Face model folder"
        )
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(
            f"model {name!r}: {folder} has no .safetensors file; convert its weights to safetensors"
        )
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not downloaded yet
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelNotFound(
            f"model {name!r} is no folder here, and not on the hub ({type(error).__name__}: {reason}): "
            "check the name and the network, or give the path of a model folder"
        ) from error
