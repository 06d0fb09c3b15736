"""``scalerl``: the arguments, and which command takes them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scalerl_api.spec import ScaleRLRun
from scalerl_cli.curves.arguments import add_curve_commands
from scalerl_cli.exits import INTERRUPTED
from scalerl_operator.plan import plan
from scalerl_operator.workloads import Plan


def parser() -> argparse.ArgumentParser:
    """The command line, as ``--help`` shows it."""
    top = argparse.ArgumentParser(
        prog="scalerl",
        description="Train a language model by reinforcement learning.",
        epilog="exit codes: 0 done, 1 failed, 2 bad input (nothing started), 130 interrupted",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a ScaleRLRun on this machine")
    run.add_argument("file", type=Path, metavar="FILE", help="the run, as YAML")
    run.add_argument(
        "--dir", type=Path, metavar="DIR", help="where it keeps its files (default: runs/NAME-N)"
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in DIR (default: the newest runs/NAME-N); what of FILE may have changed: docs/operations.md",
    )
    run.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="ROLE=CPUS",
        help="keep a role on these CPUs, e.g. --pin trainer=0 --pin generator=1,2 (for measurements)",
    )

    validate = commands.add_parser("validate", help="check run files: all problems of all files")
    validate.add_argument("files", type=Path, nargs="+", metavar="FILE")
    validate.add_argument(
        "--any-machine",
        action="store_true",
        help="leave out whether this machine has the devices and the memory",
    )
    validate.add_argument(
        "--show", action="store_true", help="print every value of the recipe, and where it is from"
    )

    plot = commands.add_parser("plot", help="draw DIR/curve.png from DIR/curve.csv")
    plot.add_argument("dir", type=Path, metavar="DIR")

    export = commands.add_parser("export", help="write a checkpoint's model as transformers and vLLM load it")
    export.add_argument("dir", type=Path, metavar="DIR", help="the run's directory")
    export.add_argument(
        "--to", type=Path, required=True, metavar="PATH", help="a folder that does not exist yet"
    )
    export.add_argument(
        "--step", type=int, metavar="N", help="a checkpoint that was kept (default: the newest)"
    )

    replay = commands.add_parser("replay", help="make the autoscaler's recorded decisions of a run again")
    replay.add_argument(
        "source",
        type=Path,
        metavar="DIR|FILE",
        help="the run's directory, or what `kubectl get configmap -l scalerl.dev/run=NAME -o yaml` printed (- for "
        "standard input)",
    )
    replay.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="a run file: what its spec.autoscaling would have done differently",
    )

    add_curve_commands(commands)
    return top


def main(argv: Sequence[str] | None = None, *, planner: Callable[[ScaleRLRun], Plan] = plan) -> int:
    """The command; returns its exit code. ``planner`` says what runs for a spec."""
    started = time.monotonic()
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "run":
            from scalerl_cli.run import run

            return run(
                arguments.file,
                arguments.dir,
                resume=arguments.resume,
                pins=arguments.pin,
                planner=planner,
                started=started,
            )
        if arguments.command == "validate":
            from scalerl_cli.validate import validate

            return validate(arguments.files, any_machine=arguments.any_machine, show=arguments.show)
        if arguments.command == "fit":
            from scalerl_cli.curves.fit import run_fit

            return run_fit(arguments)
        if arguments.command == "plan":
            from scalerl_cli.curves.plan import run_plan

            return run_plan(arguments)
        if arguments.command == "export":
            from scalerl_cli.export import export

            return export(arguments.dir, arguments.to, arguments.step)
        if arguments.command == "replay":
            from scalerl_cli.replay import replay

            return replay(arguments.source, arguments.policy)
        if arguments.command == "plot":
            from scalerl_cli.plot import plot

            return plot(arguments.dir)
        raise AssertionError(f"no code for the command {arguments.command}")
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
