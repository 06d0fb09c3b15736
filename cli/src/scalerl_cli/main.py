"""``scalerl``: the argument parser, and the dispatch to the commands."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scalerl_api.spec import ScaleRLRun
from scalerl_cli.clusters.arguments import NAMES as CLUSTER_COMMANDS
from scalerl_cli.clusters.arguments import add_cluster_commands, add_connection
from scalerl_cli.curves.arguments import add_curve_commands
from scalerl_cli.exits import INTERRUPTED
from scalerl_cli.rollouts import SORTS, count, interval, step_interval, text_argument
from scalerl_cli.simulation.arguments import add_simulate
from scalerl_operator.role_containers import plan
from scalerl_operator.workloads import Plan


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    top = argparse.ArgumentParser(
        prog="kubectl scalerl" if Path(sys.argv[0]).name == "kubectl-scalerl" else "scalerl",
        description="Train a language model by reinforcement learning.",
        epilog="exit codes: 0 finished, 1 failed, 2 invalid input (nothing started), 130 interrupted; on a cluster "
        "also 3 not found, 4 not allowed",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a ScaleRLRun on this machine")
    run.add_argument("file", type=Path, metavar="FILE", help="run file (YAML)")
    run.add_argument("--dir", type=Path, metavar="DIR", help="run directory (default: runs/NAME-N)")
    run.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in DIR (default: the newest runs/NAME-N); for fields of FILE that may change, see docs/operations.md",
    )
    run.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="ROLE=CPUS",
        help="pin a role to CPUs, such as --pin trainer=0 --pin generator=1,2 (for benchmarks)",
    )

    validate = commands.add_parser("validate", help="validate run files and list all problems")
    validate.add_argument("files", type=Path, nargs="+", metavar="FILE")
    validate.add_argument(
        "--any-machine",
        action="store_true",
        help="skip the checks of devices and memory of this machine",
    )
    validate.add_argument(
        "--show", action="store_true", help="print every value of the recipe with its origin"
    )

    data = commands.add_parser("data", help="show what a run would read of its data, and check the answers")
    data.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run file (YAML), or data files (.jsonl, .json, .csv, .parquet, .arrow)",
    )
    data.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="FIELD=EXPRESSION",
        help="of data files: where a field is, such as answer=reward_model.ground_truth",
    )
    data.add_argument("--answer-pattern", metavar="PATTERN", help="of data files: task.dataset.answerPattern")
    data.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help="of data files: task.dataset.filter.where",
    )
    data.add_argument(
        "--verifier",
        metavar="NAME",
        help="of data files: verifier of the check (default: number or math-verify)",
    )
    data.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder with the tokenizer (default: model.path of the run file)",
    )
    data.add_argument(
        "--sample", type=int, metavar="N", help="check the answers of N evenly spaced prompts (default: all)"
    )

    rollouts = commands.add_parser(
        "rollouts",
        help="read the recorded rollouts of a run: prompts, completions, rewards",
        description="Show rollouts of the run in DIR, of which the run records a sample (spec.rollouts). A range is N, N:M, N: or "
        ":M, with both ends. All conditions must hold.",
    )
    rollouts.add_argument("dir", type=Path, metavar="DIR")
    rollouts.add_argument(
        "--step", type=step_interval, metavar="RANGE|last", help="steps; of evaluations, versions"
    )
    rollouts.add_argument(
        "--split", choices=("train", "held-out"), help="training or evaluations (default: both)"
    )
    rollouts.add_argument("--task", metavar="NAME", help="task of a mix, or evaluation set")
    rollouts.add_argument("--prompt", type=text_argument, metavar="ID", help="one prompt, over time")
    rollouts.add_argument("--sample", type=count, metavar="N", help="completion N of each group, from 0")
    rollouts.add_argument(
        "--label",
        type=text_argument,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the prompt",
    )
    rollouts.add_argument("--reward", type=interval, metavar="RANGE", help="reward, such as 0 or 0.5:1")
    rollouts.add_argument("--truncated", action="store_true", help="only completions that were cut off")
    rollouts.add_argument(
        "--excluded",
        nargs="?",
        const="",
        metavar="REASON",
        help="only what was not trained on, such as zero-variance",
    )
    rollouts.add_argument(
        "--contains",
        type=text_argument,
        action="append",
        default=[],
        metavar="TEXT",
        help="text in the completion (case matters)",
    )
    rollouts.add_argument("--sort", choices=SORTS, default="step", help="order (default: step)")
    rollouts.add_argument("--descending", action="store_true", help="largest first")
    rollouts.add_argument(
        "--limit", type=count, default=100, metavar="N", help="number of rollouts (default: 100; 0: all)"
    )
    rollouts.add_argument("--full", action="store_true", help="show long texts whole")
    rollouts.add_argument("--json", action="store_true", help="print JSON objects, one a line")

    status = commands.add_parser("status", help="say in one sentence what is wrong first in a run")
    status.add_argument("dir", type=Path, metavar="DIR")

    view = commands.add_parser(
        "view",
        help="show runs as a local web page: curves, metrics, rollouts, decisions, a timeline",
        description="Serve a page of the runs in DIRs on this machine, also while they go on. Nothing is written into DIRs.",
    )
    view.add_argument(
        "dirs",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="directory of a run, or NAMESPACE/NAME of a run on a cluster",
    )
    view.add_argument(
        "--port",
        type=port,
        metavar="N",
        help="port on the loopback address (default: the first free one from 8660 on)",
    )
    view.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="instead write the timeline of the run for Perfetto (JSON of Chrome's traces)",
    )
    view.add_argument("--context", metavar="NAME", help="of a run on a cluster: context of the kubeconfig")
    view.add_argument("--kubeconfig", metavar="FILE", help="of a run on a cluster: kubeconfig, as in kubectl")
    view.add_argument("--image", metavar="IMAGE", help="of a run without pods: as of scalerl fetch")

    score = commands.add_parser("score", help="score given completions by the verifier of a run")
    score.add_argument("file", type=Path, metavar="FILE", help="run file (YAML)")
    score.add_argument(
        "--completions",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON lines: {"id": or "prompt": of a prompt of the run, "completion": or "completions":}; with "answer", a prompt of its own',
    )
    score.add_argument("--task", metavar="NAME", help="task of a mix, or evaluation set (default: the first)")

    plot = commands.add_parser("plot", help="plot DIR/curve.csv as DIR/curve.png")
    plot.add_argument("dir", type=Path, metavar="DIR")

    export = commands.add_parser("export", help="export the model of a checkpoint in Hugging Face format")
    export.add_argument("dir", type=Path, metavar="DIR", help="run directory")
    export.add_argument(
        "--to", type=Path, required=True, metavar="PATH", help="output directory; must not exist"
    )
    export.add_argument(
        "--step", type=int, metavar="N", help="step of a kept checkpoint (default: the newest)"
    )

    fork = commands.add_parser(
        "fork",
        help="start a new run from a checkpoint of another",
        description="On this machine: make the directory of a new run from a checkpoint of RUN, the directory of another, for `scalerl "
        "run --resume`. On a cluster: print the run file of a fork of the run with the name RUN, for `scalerl submit -`.",
    )
    fork.add_argument("source", metavar="RUN", help="directory of a run, or name of a run on a cluster")
    fork.add_argument("--step", type=int, metavar="N", help="step of a kept checkpoint (default: the newest)")
    fork.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of the new run (default: runs/NAME-N)"
    )
    fork.add_argument(
        "--name", metavar="NAME", help="name of the new run (default: that of FILE, or RUN-fork)"
    )
    fork.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="run file of the new run (default: the source's spec)"
    )
    fork.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the spec, such as --set recipe.optimizer.learningRate=1e-5",
    )
    add_connection(fork)

    replay = commands.add_parser("replay", help="recompute the recorded decisions of the autoscaler")
    replay.add_argument(
        "source",
        type=Path,
        metavar="DIR|FILE",
        help="run directory or its decisions.jsonl (- for standard input; on a cluster: kubectl exec -c coordinator "
        "NAME-coordinator-0 -- cat /run/scalerl/run/decisions.jsonl | scalerl replay -)",
    )
    replay.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="run file with another spec.autoscaling: show the decisions that would differ",
    )

    add_simulate(commands)
    add_curve_commands(commands)
    add_cluster_commands(commands)
    return top


def port(text: str) -> int:
    """A number of a TCP port; 0 is any free one."""
    number = int(text)
    if not 0 <= number < 2**16:
        raise ValueError(text)
    return number


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
        if arguments.command == "data":
            from scalerl_cli.data import run_data

            return run_data(arguments)
        if arguments.command == "rollouts":
            from scalerl_cli.rollouts import run_rollouts

            return run_rollouts(arguments)
        if arguments.command == "status":
            from scalerl_cli.health import run_status

            return run_status(arguments.dir)
        if arguments.command == "view":
            from scalerl_cli.page.command import run_view

            return run_view(arguments)
        if arguments.command == "score":
            from scalerl_cli.score import run_score

            return run_score(arguments)
        if arguments.command == "compare":
            from scalerl_cli.compare import run_compare

            return run_compare(arguments, planner)
        if arguments.command == "fit":
            from scalerl_cli.curves.fit import run_fit

            return run_fit(arguments)
        if arguments.command == "plan":
            from scalerl_cli.curves.plan import run_plan

            return run_plan(arguments)
        if arguments.command == "report":
            from scalerl_cli.curves.label_report import run_report

            return run_report(arguments)
        if arguments.command == "simulate":
            from scalerl_cli.simulate import run_simulate

            return run_simulate(arguments)
        if arguments.command == "export":
            from scalerl_cli.export import export

            return export(arguments.dir, arguments.to, arguments.step)
        if arguments.command == "fork":
            from scalerl_cli.fork import fork

            return fork(arguments)
        if arguments.command == "replay":
            from scalerl_cli.replay import replay

            return replay(arguments.source, arguments.policy)
        if arguments.command == "plot":
            from scalerl_cli.plot import plot

            return plot(arguments.dir)
        if arguments.command in CLUSTER_COMMANDS:
            from scalerl_cli.clusters.command import run_cluster_command

            return run_cluster_command(arguments)
        raise AssertionError(f"no code for the command {arguments.command}")
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
