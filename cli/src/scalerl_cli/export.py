"""``scalerl export``: the model of a checkpoint in Hugging Face format, by the trainer's module, which needs torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from scalerl_cli.exits import BAD_INPUT
from scalerl_cli.output import say


def export(directory: Path, to: Path, step: int | None) -> int:
    """Run ``scalerl_trainer.export``; returns its exit code."""
    if find_spec("scalerl_trainer") is None:
        say(
            "scalerl export needs the trainer's packages: use the trainer's image, or `make setup`",
            error=True,
        )
        return BAD_INPUT
    command = [sys.executable, "-m", "scalerl_trainer.export", str(directory), "--to", str(to)]
    return subprocess.call([*command, *([] if step is None else ["--step", str(step)])])
