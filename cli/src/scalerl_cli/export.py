"""``scalerl export``: the model of a checkpoint in Hugging Face format, by the trainer's module, which needs torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec

from scalerl_cli.exits import Refused


def export(arguments: argparse.Namespace) -> int:
    """Run ``scalerl_trainer.export``; returns its exit code."""
    if find_spec("scalerl_trainer") is None:
        raise Refused("scalerl export needs the trainer's packages: use the trainer's image, or `make setup`")
    command = [sys.executable, "-m", "scalerl_trainer.export", str(arguments.dir), "--to", str(arguments.to)]
    return subprocess.call([*command, *([] if arguments.step is None else ["--step", str(arguments.step)])])
