"""What happened, for people: a bounded log of one-line events, and the series that the page draws."""

import json
import logging
import math
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import trio

from swarmnode.data_directory import atomic_write

log = logging.getLogger("swarmnode")

MAX_EVENTS = 200
SAME_KIND_EVERY_S = 5.0
"""Events that peers can cause are shown this often per kind; those between are counted in the next."""

MAX_POINTS = 1_000
"""Points kept per series of this node; beyond, every second one of the older half is dropped, so that the
whole run stays visible."""
MAX_POINTS_OF_OTHERS = 200
MAX_OTHERS = 8
"""Other nodes whose points are kept: any number of them may claim anything."""
MAX_FILE_LINES = 20 * MAX_POINTS
"""A longer file of metrics is thinned at the next start."""
WRITE_EVERY_S = 1.0

SERIES = ("reward", "accuracy")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Point = dict[str, Any]


class Tell(Protocol):
    """`Journal.event`, as those see it who have something to tell."""

    def __call__(self, level: str, text: str, kind: str | None = None) -> None: ...


class Journal:
    """Events and metric points, in memory for the page; this node's own points in `metrics.jsonl` too.

    Nothing here waits for the disk: `write` does, as a service, and a full disk costs points of that file and
    nothing else.
    """

    def __init__(self, metrics_path: Path) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._own: dict[str, list[Point]] = {name: [] for name in SERIES}
        self._others: dict[str, dict[bytes, list[Point]]] = {name: {} for name in SERIES}
        self._shown: dict[str, tuple[float, int]] = {}
        self._metrics_path = metrics_path
        self._unwritten: list[str] = []

    def event(self, level: str, text: str, kind: str | None = None) -> None:
        """Log one line and show it on the page. Give a `kind`, of few, to what a peer can cause at will."""
        if kind is not None:
            now = time.monotonic()
            shown_at, left_out = self._shown.get(kind, (-math.inf, 0))
            if now - shown_at < SAME_KIND_EVERY_S:
                self._shown[kind] = (shown_at, left_out + 1)
                return
            self._shown[kind] = (now, 0)
            text += f" (and {left_out} more like it)" if left_out else ""
        event = {"t": time.time(), "level": level, "text": text}
        if self.events and self.events[-1]["text"] == text:
            self.events[-1] = event
            return
        self.events.append(event)
        log.log(_LEVELS[level], "%s", text)

    # Series

    def point(self, name: str, policy: str, version: int, value: float) -> None:
        """Add a point of this node's own policy."""
        if not math.isfinite(value):
            return
        point = {"t": time.time(), "version": version, "value": value, "policy": policy}
        _append(self._own[name], point, MAX_POINTS)
        self._unwritten.append(json.dumps({"metric": name, **point}) + "\n")
        del self._unwritten[:-MAX_POINTS]

    def point_of_other(self, name: str, author: bytes, policy: str, version: int, value: float) -> None:
        """Add a point that another node tells of its own policy."""
        others = self._others[name]
        if author not in others and len(others) >= MAX_OTHERS:
            return
        point = {"t": time.time(), "version": version, "value": value, "policy": policy}
        _append(others.setdefault(author, []), point, MAX_POINTS_OF_OTHERS)

    @property
    def series(self) -> dict[str, list[Point]]:
        """All points, ascending in time for each policy."""
        return {
            name: [*self._own[name], *(point for points in self._others[name].values() for point in points)]
            for name in SERIES
        }

    def last_own(self, name: str) -> Point | None:
        """The newest point of this node's own policy."""
        return self._own[name][-1] if self._own[name] else None

    # The file

    def load(self) -> None:
        """Read the points of earlier starts; damaged lines are left out and said."""
        damaged = lines = 0
        try:
            with open(self._metrics_path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    lines += 1
                    point = _parse(line)
                    if point is None:
                        damaged += 1
                        continue
                    name = point.pop("metric")
                    _append(self._own[name], point, MAX_POINTS)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read (%s): the curves begin anew", self._metrics_path, error.strerror)
            return
        if damaged:
            log.warning("%s: skipped %d damaged lines", self._metrics_path, damaged)
        if damaged or lines > MAX_FILE_LINES:
            # A torn last line must not swallow the next one that is written.
            text = "".join(
                json.dumps({"metric": name, **point}) + "\n" for name in SERIES for point in self._own[name]
            )
            try:
                atomic_write(self._metrics_path, text.encode())
            except OSError as error:
                log.warning("%s cannot be written (%s)", self._metrics_path, error.strerror)

    async def write(self) -> None:
        """Write new points to the file, until cancelled."""
        while True:
            await trio.sleep(WRITE_EVERY_S)
            if self._unwritten:
                lines, self._unwritten = self._unwritten, []
                await trio.to_thread.run_sync(self._write, lines)

    def write_now(self) -> None:
        """Write what `write` has not yet: at the end."""
        lines, self._unwritten = self._unwritten, []
        self._write(lines)

    def _write(self, lines: list[str]) -> None:
        try:
            with open(self._metrics_path, "a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            log.warning("%s: %d points were not written (%s)", self._metrics_path, len(lines), error.strerror)


def _append(points: list[Point], point: Point, bound: int) -> None:
    points.append(point)
    if len(points) > bound:
        half = len(points) // 2
        points[:half] = points[:half:2]


def _parse(line: str) -> Point | None:
    """The point of a line, None if it is damaged."""
    try:
        point = json.loads(line)
        sound = (
            point["metric"] in SERIES
            and isinstance(point["version"], int)
            and isinstance(point["policy"], str)
            and all(math.isfinite(point[name]) for name in ("t", "value"))
        )
    except (ValueError, KeyError, TypeError):
        return None
    keys = ("metric", "t", "version", "value", "policy")
    return {key: point[key] for key in keys} if sound and line.endswith("\n") else None
