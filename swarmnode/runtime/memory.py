"""How much memory processes hold."""

import os
from collections.abc import Sequence

import psutil


def resident_mb(pids: Sequence[int] = ()) -> float:
    """Resident memory of the processes (this one by default), in MB; processes that are gone count
    nothing."""
    total = 0
    for pid in pids or (os.getpid(),):
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total / 1e6
