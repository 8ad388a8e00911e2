"""Imports go one way: swarmnode → trainer, peers → protocol; found by reading every file of the tree."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "protocol": {"protocol"},
    "peers": {"peers", "protocol"},
    "trainer": {"trainer", "protocol"},
    "swarmnode": {"swarmnode", "trainer", "peers", "protocol"},
}
OURS = {*MAY_IMPORT, "tests", "scripts", "benchmarks"}
IMPORTERS = {"__import__", "import_module", "importlib.import_module"}
PROTOCOL_LIBRARIES = {"msgpack", "cryptography", "numpy", "pydantic", "zstandard"}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import in a file, those inside functions included."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            yield from (
                (node.lineno, str(name.value)) for name in node.args if isinstance(name, ast.Constant)
            )


def imports_of(package: str) -> list[tuple[str, str]]:
    """("file:line", top-level name) of every import in a package."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", name.split(".")[0])
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in imported(path)
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package: str) -> None:
    wrong = [
        f"{where} imports {name}"
        for where, name in imports_of(package)
        if name in OURS and name not in MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_protocol_needs_five_libraries_and_the_standard_library() -> None:
    allowed = PROTOCOL_LIBRARIES | set(sys.stdlib_module_names) | {"protocol"}
    wrong = [f"{where} imports {name}" for where, name in imports_of("protocol") if name not in allowed]
    assert not wrong, "\n".join(wrong)


def test_protocol_does_no_input_or_output_and_reads_no_clock() -> None:
    effects = {
        "os",
        "io",
        "pathlib",
        "socket",
        "subprocess",
        "time",
        "datetime",
        "threading",
        "random",
    }
    wrong = [f"{where} imports {name}" for where, name in imports_of("protocol") if name in effects]
    assert not wrong, "\n".join(wrong)


def test_peers_knows_nothing_of_models_and_trainer_nothing_of_networks() -> None:
    strangers = {"peers": {"torch", "transformers", "safetensors"}, "trainer": {"trio", "libp2p", "aiohttp"}}
    wrong = [
        f"{where} imports {name}"
        for package, names in strangers.items()
        for where, name in imports_of(package)
        if name in names
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_unpickles() -> None:
    picklers = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    wrong = [
        f"{where} imports {name}"
        for package in MAY_IMPORT
        for where, name in imports_of(package)
        if name in picklers
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "peers" / "inner"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(
        "import trainer.loss as x, os\n"
        "from swarmnode import cli\n"
        "def f():\n    from torch.nn import Module\n"
        "from . import b\nfrom ..base import c\n"
        "__import__('pickle')\n"
    )
    assert {name for _, name in imported(folder / "a.py")} == {
        *("trainer.loss", "os", "swarmnode", "torch.nn", "peers.inner", "peers.base", "pickle")
    }
