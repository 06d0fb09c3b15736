"""The arguments of the commands for runs on this machine. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_analysis.rollout_search import SORTS
from scalerl_cli.argument_types import interval, port, step_interval, text_argument, whole
from scalerl_cli.clusters.arguments import add_connection

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_local_commands(commands: Commands) -> None:
    """Add all commands of this module."""
    _add_run(commands)
    _add_data(commands)
    _add_rollouts(commands)
    _add_view(commands)
    _add_results(commands)
    _add_fork(commands)
    _add_replay(commands)


def _add_run(commands: Commands) -> None:
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

    run.add_argument(
        "--runtime",
        metavar="NAME",
        help="what runs its processes: a runtime of an installed package (default: this machine)",
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
    validate.add_argument(
        "--memory",
        action="store_true",
        help="print what each role and rank allocates, by ZeRO stage, and the lowest stage that fits",
    )


def _add_data(commands: Commands) -> None:
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


def _add_rollouts(commands: Commands) -> None:
    rollouts = commands.add_parser(
        "rollouts",
        help="read the recorded rollouts of a run: prompts, completions, rewards",
        description="Show rollouts of the run in DIR, of which the run records a sample (spec.rollouts). A range is N, N:M, N: or "
        ":M, with both ends. All conditions must hold.",
    )
    rollouts.add_argument("dir", type=Path, metavar="DIR")
    add_rollout_conditions(rollouts)
    rollouts.add_argument(
        "--full", action="store_true", help="show long texts whole; with --json also the columns of tokens"
    )
    rollouts.add_argument("--json", action="store_true", help="print JSON objects, one a line")


def add_rollout_conditions(rollouts: argparse.ArgumentParser) -> None:
    """The conditions and the order of a search of rollouts, also for the requests of the page."""
    rollouts.add_argument(
        "--step", type=step_interval, metavar="RANGE|last", help="steps; of evaluations, versions"
    )
    rollouts.add_argument(
        "--split", choices=("train", "held-out"), help="training or evaluations (default: both)"
    )
    rollouts.add_argument("--task", metavar="NAME", help="task of a mix, or evaluation set")
    rollouts.add_argument("--prompt", type=text_argument, metavar="ID", help="one prompt, over time")
    rollouts.add_argument("--sample", type=whole, metavar="N", help="completion N of each group, from 0")
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
        "--limit", type=whole, default=100, metavar="N", help="number of rollouts (default: 100; 0: all)"
    )


def _add_view(commands: Commands) -> None:
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


def _add_results(commands: Commands) -> None:
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


def _add_fork(commands: Commands) -> None:
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


def _add_replay(commands: Commands) -> None:
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
