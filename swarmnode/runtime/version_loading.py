"""What the rollout process has loaded, what to give it next and how, and whether its groups may be sent.

A version can be loaded by deltas before its snapshot is rebuilt. Until that is verified the version is in use
but its groups are held back; if it turns out wrong they are thrown away and the last good version is loaded.
Decisions only, no input or output.
"""

from collections.abc import Sequence
from typing import Any, Literal

from swarmnode.runtime.version_store import StoredVersion, probe_message

Verdict = Literal["send", "hold", "drop"]


class VersionLoading:
    """Promises: one load at a time; versions only move forward, but for those that are withdrawn; what failed
    is not tried again in the same way by the same process."""

    def __init__(self) -> None:
        self.loaded: int | None = None
        """None too while a withdrawn version is still in the process."""
        self.runs_withdrawn = False
        """Whether that is so: what comes from the process then is worth nothing, whatever its version."""
        self._loading: int | None = None
        self._loading_is_withdrawn = False
        self._offered: dict[int, StoredVersion] = {}
        self._unverified: set[int] = set()
        self._failed: set[tuple[int, str]] = set()
        self._can_patch = True

    def offer(self, stored: StoredVersion) -> None:
        """A version is on disk: its delta, or its verified snapshot."""
        self._offered[stored.version] = stored
        if stored.weights_path is not None:
            self._unverified.discard(stored.version)
        self._forget_old()

    def withdraw(self, versions: Sequence[int]) -> None:
        """Versions that were offered are wrong, or their files are damaged."""
        for version in versions:
            self._offered.pop(version, None)
        if self.loaded in versions:
            self.loaded, self.runs_withdrawn = None, True
        if self._loading in versions:
            self._loading_is_withdrawn = True

    def next_load(self) -> dict[str, Any] | None:
        """The message of the next load, which has then begun; None when there is nothing to load now."""
        if self._loading is not None:
            return None
        oldest = -1 if self.loaded is None else self.loaded
        for version in sorted(self._offered, reverse=True):
            if version <= oldest:
                break
            stored = self._offered[version]
            chain = None if (version, "deltas") in self._failed else self._chain(version)
            has_file = stored.weights_path is not None and (version, "file") not in self._failed
            if chain is None and not has_file:
                continue
            self._loading = version
            return {
                "type": "load",
                "version": version,
                "path": None if chain else str(stored.weights_path),
                "deltas": chain or [],
                "probe": probe_message(stored.manifest.probe),
            }
        return None

    def _chain(self, version: int) -> list[dict[str, Any]] | None:
        """The deltas that lead from what is loaded to `version`."""
        if self.loaded is None or not self._can_patch:
            return None
        chain: list[dict[str, Any]] = []
        while version > self.loaded:
            stored = self._offered.get(version)
            delta = None if stored is None else stored.manifest.delta
            if stored is None or delta is None or stored.delta_path is None:
                return None
            parent = self._offered.get(delta.parent)
            if parent is None or parent.state != delta.parent_state:
                return None
            chain.insert(0, {"version": version, "parent": delta.parent, "path": str(stored.delta_path)})
            version = delta.parent
        return chain if version == self.loaded else None

    def on_loaded(self, message: dict[str, Any]) -> None:
        """The process has loaded a version."""
        version: int = message["version"]
        self._can_patch = message.get("patch_obstacle") is None
        self.runs_withdrawn = self._loading_is_withdrawn
        self.loaded = None if self._loading_is_withdrawn else version
        stored = self._offered.get(version)
        patched = message.get("way") == "deltas"
        if patched and self.loaded is not None and (stored is None or stored.weights_path is None):
            self._unverified.add(version)
        self._loading, self._loading_is_withdrawn = None, False
        self._forget_old()

    def on_failed(self, message: dict[str, Any]) -> None:
        """The process could not load a version and has its old weights."""
        self._failed.add((message["version"], message["way"]))
        self._loading, self._loading_is_withdrawn = None, False

    def on_process_down(self) -> None:
        """Nothing is loaded any more."""
        self.loaded = self._loading = None
        self._loading_is_withdrawn = self.runs_withdrawn = False
        self._failed.clear()

    def verdict(self, version: int) -> Verdict:
        """What to do with a group that `version` made."""
        if version not in self._unverified:
            return "send"
        # What is no longer offered was withdrawn, or deleted before it could be verified.
        return "hold" if version in self._offered else "drop"

    def _forget_old(self) -> None:
        complete = [stored.version for stored in self._offered.values() if stored.weights_path is not None]
        if not complete:
            return
        in_use = [version for version in (self.loaded, self._loading) if version is not None]
        oldest = min([max(complete), *in_use])
        for version in [version for version in self._offered if version < oldest]:
            del self._offered[version]
