"""What happened, for people: a bounded log of one-line events, and the series that the page draws."""

import json
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

log = logging.getLogger("swarmnode")

MAX_EVENTS = 200
MAX_POINTS = 1_000
"""Points kept per series; beyond, every second one of the older half is dropped, so that the whole run
stays visible."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Journal:
    """Events and metric points, in memory for the page and in `metrics.jsonl` for later."""

    def __init__(self, metrics_path: Path) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.series: dict[str, list[dict[str, Any]]] = {"reward": [], "accuracy": []}
        self._metrics_path = metrics_path

    def event(self, level: str, text: str) -> None:
        """Log one line and show it on the page."""
        if self.events and self.events[-1]["text"] == text:
            self.events[-1]["t"] = time.time()
            return
        self.events.append({"t": time.time(), "level": level, "text": text})
        log.log(_LEVELS[level], "%s", text)

    def point(self, name: str, policy: str, version: int, value: float, *, own: bool) -> None:
        """Add a point of a policy's series; points of this node's own policy are also written to disk."""
        points = self.series[name]
        point = {"t": time.time(), "version": version, "value": value, "policy": policy}
        points.append(point)
        if len(points) > MAX_POINTS:
            half = len(points) // 2
            self.series[name] = points[:half:2] + points[half:]
        if own:
            with open(self._metrics_path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"metric": name, **point}) + "\n")

    def load(self) -> None:
        """Read the points of earlier starts; a torn last line is left out."""
        if not self._metrics_path.exists():
            return
        for line in self._metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                point = json.loads(line)
                self.series[point.pop("metric")].append(point)
            except (ValueError, KeyError):
                log.warning("%s: skipped a damaged line", self._metrics_path)
