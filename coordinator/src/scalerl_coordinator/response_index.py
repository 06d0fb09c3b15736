"""The in-memory index of the response store: the location of the newest group of each prompt, as one integer."""

from __future__ import annotations

import threading
from typing import Final

from scalerl_api.wire import PromptRef
from scalerl_coordinator.response_segments import Head

MAX_GROUPS: Final = 2**20
"""Maximum number of groups in the index; each takes about 200 bytes."""

Location = tuple[int, int, int]
"""Location of a frame: segment, offset, length."""


def _key(prompt: PromptRef | Head) -> int:
    return prompt.task << 64 | (prompt.prompt if isinstance(prompt, Head) else prompt.index)


def _pack(at: Location) -> int:
    """A location as one integer, which takes a third of a tuple's memory and is not visited by the garbage collector."""
    segment, offset, length = at
    return segment << 64 | offset << 32 | length


def _unpack(packed: int) -> Location:
    return packed >> 64, packed >> 32 & 0xFFFFFFFF, packed & 0xFFFFFFFF


class ResponseIndex:
    """Locations by prompt. Thread-safe."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self._newest: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def prompts(self) -> int:
        return len(self._newest)

    @property
    def full(self) -> bool:
        return len(self._newest) >= self._max_groups

    def clear(self) -> None:
        with self._lock:
            self._newest.clear()

    def newest(self, prompt: PromptRef) -> Location | None:
        with self._lock:
            packed = self._newest.get(_key(prompt))
        return None if packed is None else _unpack(packed)

    def is_newest(self, head: Head, at: Location) -> bool:
        with self._lock:
            return self._newest.get(_key(head)) == _pack(at)

    def add(self, head: Head, at: Location) -> None:
        """Make a frame the newest of its prompt."""
        with self._lock:
            self._newest[_key(head)] = _pack(at)

    def remove(self, prompt: PromptRef | Head, at: Location) -> None:
        """Remove a prompt's entry if it is ``at``."""
        key = _key(prompt)
        with self._lock:
            if self._newest.get(key) == _pack(at):
                del self._newest[key]
