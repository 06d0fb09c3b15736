"""``scalerl``: the argument parser, and the dispatch to the commands."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from scalerl_api.registry import Kind
from scalerl_api.spec import ScaleRLRun
from scalerl_cli.arguments import add_commands
from scalerl_cli.exits import exit_code
from scalerl_cli.output import echo
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.workloads import Plan


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    top = argparse.ArgumentParser(
        prog="kubectl scalerl" if Path(sys.argv[0]).name == "kubectl-scalerl" else "scalerl",
        description="Train a language model by reinforcement learning.",
        epilog="exit codes: 0 finished, 1 failed, 2 invalid input (nothing started), 130 interrupted; on a cluster "
        "also 3 not found, 4 not allowed",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_commands(commands)
    for entry in entry_points(group=Kind.COMMAND):
        try:
            entry.load()(commands)
        except (Exception, SystemExit) as error:  # the other commands work
            echo(f"the command {entry.name} ({entry.value}): {type(error).__name__}: {error}", error=True)
    return top


def _use_utf8() -> None:
    """Start this command again in Python's UTF-8 mode if the locale's encoding is another, as with ``LC_ALL=C``.

    Run files are UTF-8 and so are the paths in them; elsewhere they could be neither opened nor printed, here and in the child
    processes, which inherit the mode.
    """
    if sys.flags.utf8_mode or codecs.lookup(sys.getfilesystemencoding()).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    # The option, since an interpreter with -E or -I does not read the variable.
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606


def main(argv: Sequence[str] | None = None, *, planner: Callable[[ScaleRLRun], Plan] = plan) -> int:
    """Run the command; returns its exit code. ``planner`` makes the plan of processes for a spec."""
    started = time.monotonic()
    if argv is None:
        _use_utf8()
        if isinstance(
            sys.stdout, io.TextIOWrapper
        ):  # as stderr: a file's name may have bytes that are no text
            sys.stdout.reconfigure(errors="backslashreplace")
    arguments = parser().parse_args(argv)
    arguments.started, arguments.planner = started, planner
    module, function = arguments.function.split(":")
    return exit_code(lambda: getattr(import_module(module), function)(arguments))


if __name__ == "__main__":
    sys.exit(main())
