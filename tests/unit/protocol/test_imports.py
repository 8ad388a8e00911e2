"""The wire's rules can be used by a program that has no torch, no network library and no event loop."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import importlib, pkgutil, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "libp2p", "transformers", "trio", "peers", "trainer", "swarmnode"}:
            raise ImportError(f"protocol must not import {name}")

sys.meta_path.insert(0, Forbid())
import protocol
names = [module.name for module in pkgutil.iter_modules(protocol.__path__)]
for name in names:
    importlib.import_module(f"protocol.{name}")
print(len(names))
"""


def test_protocol_imports_without_torch_libp2p_transformers_or_trio() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(
        [path for path in (ROOT / "protocol").glob("*.py") if path.stem != "__init__"]
    )
