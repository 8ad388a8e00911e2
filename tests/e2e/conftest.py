"""Swarms of real node processes for the end-to-end tests."""

import sys
from pathlib import Path

# Tests are imported one by one (importmode=importlib): their helpers lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
