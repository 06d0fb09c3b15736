"""One role of a run as a process: ``ROLE`` is ``{"module": …, "argv": […], "environ": {…}, "log": path,
"largest_file": bytes or None, "dies_at": see ``trainer_run.Run``, or None, "retry_seconds": of a failed checkpoint, or None}``."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from scalerl_api.paths import RunPaths

role = ROLE  # type: ignore[name-defined]  # noqa: F821  # given by the code that runs this file


def die() -> None:
    """From within: a test that looks from without may be late for so few steps."""
    paths = RunPaths(Path(role["environ"]["SCALERL_DIR"]))
    rows, saved = paths.supervised_metrics, paths.mid_training.checkpoints
    while (
        not rows.exists()
        or rows.read_text().count('"loss"') < role["dies_at"]
        or not any(saved.glob("step-*"))
    ):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


descriptor = os.open(role["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(descriptor, 1)
os.dup2(descriptor, 2)
os.environ.update(role["environ"])
if role.get("largest_file") is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (role["largest_file"], role["largest_file"]))
if role.get("dies_at") is not None:
    threading.Thread(target=die, daemon=True).start()
code = 70
try:
    import torch

    torch.set_num_threads(1)
    given = {}
    if role.get("retry_seconds") is not None and role["module"] == "scalerl_trainer.main":
        from scalerl_trainer.checkpoints.write import Timings

        given["timings"] = Timings(retry=role["retry_seconds"], blind_retry=role["retry_seconds"])
    code = importlib.import_module(role["module"]).main(role["argv"], **given)
except SystemExit as leaving:
    code = leaving.code if isinstance(leaving.code, int) else 1
except BaseException:
    traceback.print_exc()
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
