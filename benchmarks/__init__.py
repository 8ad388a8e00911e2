"""Measurements of what the documents promise: `python -m benchmarks.NAME --json FILE [--quick]`."""
