"""Memory before it is used: refuse with advice what would otherwise end in the kernel killing the process."""

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


class NotEnoughMemory(RuntimeError):
    """Something would not fit. The message says how much is missing and what to change."""


def available_bytes(device: torch.device) -> int:
    """Memory free for new allocations on `device`, the container's limit included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)
    available = int(psutil.virtual_memory().available)
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return available
    # The file cache that nobody reads any more counts as used but is given back on demand.
    statistics = dict(line.split() for line in _read(CGROUP / "memory.stat").splitlines())
    return min(available, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))


def _read(path: Path) -> str:
    """A control group's file; empty where there is none (no container, no control groups)."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def refuse_unless_fits(needed_bytes: int, device: torch.device, purpose: str, advice: str) -> None:
    """Raise `NotEnoughMemory` when `needed_bytes` exceed what is available on `device`."""
    available = available_bytes(device)
    if needed_bytes > available:
        raise NotEnoughMemory(
            f"{purpose} needs about {needed_bytes / 2**20:,.0f} MiB on {device}, "
            f"{available / 2**20:,.0f} MiB are available: {advice}"
        )
