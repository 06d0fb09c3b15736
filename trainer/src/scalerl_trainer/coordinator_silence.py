"""For how long the coordinator has not answered rank 0, and for how long rank 0 has waited for its answers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_trainer.coordinator_client import CoordinatorUnreachable, VolumeFull

log = logging.getLogger(__name__)

_FULL_SECONDS = 5.0
"""Between two requests to a coordinator whose volume is full."""


class CoordinatorSilence:
    """Ends the trainer once the coordinator has not answered for :data:`COORDINATOR_TIMEOUT_SECONDS`."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._answered = time.monotonic()
        """When the coordinator last answered."""
        self._waited_seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Adds the duration of a request for what to do, and of the wait after it, to :meth:`take_waited_seconds`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._waited_seconds += time.perf_counter() - begin

    def take_waited_seconds(self) -> float:
        """The seconds of :meth:`waiting` since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def answered(self) -> None:
        """The coordinator has answered."""
        self._answered = time.monotonic()

    def no_answer(self, error: CoordinatorUnreachable) -> None:
        """Wait before the next request. Raises ``error`` once the coordinator has been silent for too long."""
        if isinstance(error, VolumeFull):  # it answers, and nothing is lost meanwhile
            self._answered = time.monotonic()
            log.warning("waiting until the coordinator can write its volume: %s", error)
            self._stop.wait(_FULL_SECONDS)
            return
        silent_seconds = time.monotonic() - self._answered
        if silent_seconds > COORDINATOR_TIMEOUT_SECONDS:
            raise error
        log.warning("the coordinator has not answered for %.0f s: %s", silent_seconds, error)
        self._stop.wait(min(2.0, 0.2 + silent_seconds / 10))
