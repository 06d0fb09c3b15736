"""SIGTERM at the worst moment."""

from __future__ import annotations

import subprocess
import sys

WAITING = """
import os, signal, threading
from scalerl_trainer.main import set_on_signals
stop = threading.Event()
set_on_signals(stop)
with stop._cond:  # as inside stop.wait(), which the leader calls while the coordinator does not answer
    os.kill(os.getpid(), signal.SIGTERM)
print("stopped" if stop.wait(30) else "missed")
"""


def test_signal_inside_wait_on_the_event_does_not_deadlock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "stopped"
