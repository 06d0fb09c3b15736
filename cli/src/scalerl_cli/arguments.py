"""The commands and their arguments, as tables. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scalerl_analysis.rollout_search import SORTS
from scalerl_cli import argument_types as types
from scalerl_lifecycle.workloads import Role

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Options = Mapping[str, Any]
"""Help by the names and the metavar of an argument. A table in a table is a group with that title, or of options that exclude each other."""
_EITHER: Final = "either"

ROLLOUT_CONDITIONS: Final = {
    "--step RANGE|last": "steps; of evaluations, versions",
    "--split": "training or evaluations (default: both)",
    "--task NAME": "task of a mix, or evaluation set",
    "--prompt ID": "one prompt, over time",
    "--sample N": "completion N of each group, from 0",
    "--label NAME=VALUE": "label of the prompt",
    "--reward RANGE": "reward, such as 0 or 0.5:1",
    "--truncated": "only completions that were cut off",
    "--excluded REASON": "only what was not trained on, such as zero-variance",
    "--contains TEXT": "text in the completion (case matters)",
    "--sort": "order (default: step)",
    "--descending": "largest first",
    "--limit N": "number of rollouts (default: 100; 0: all)",
}
"""The conditions and the order of a search of rollouts, also of the page's requests."""
_CONNECTION: Final[Options] = {
    "cluster, as in kubectl": {
        "-n --namespace NAMESPACE": "namespace (default: that of the context)",
        "--context NAME": "context of the kubeconfig",
        "--kubeconfig FILE": "kubeconfig (default: KUBECONFIG, else ~/.kube/config)",
    }
}
_CURVE: Final = "CSV with columns compute,reward[,samples]; a run directory; or an export of W&B, TensorBoard, MLflow, TRL or verl"
_COLUMNS: Final = {
    "--x COLUMN": "column with the compute (default: compute)",
    "--y COLUMN": "column or metric with the reward of evaluations (default: reward, or the only series of an export)",
    "--samples COLUMN": "column with the number of samples per evaluation, or a constant (default: samples, if the file has it)",
    "--resumed": "where compute goes back, as in the log of a resumed run, leave out the rows that it goes back over",
    "--scale LOW,HIGH": "lowest and highest possible reward in the file; write --scale=-1,1 for rewards of ±1",
    "--unit NAME": "unit of compute, for tables and figures",
}
_ANALYSIS: Final[Options] = {
    **_COLUMNS,
    "--prior RUN": "earlier runs of the same task and model: directories (runs/*) or files with the same columns",
    "--late-rises": "public curves from which the probability of late rises is taken (default: language_models)",
    "--plot OUT.png": "write a figure (.png, .pdf or .svg)",
    "--json": "print one JSON object instead of text",
    _EITHER: {
        "--rate C_PER_DEVICE_HOUR": "compute per device-hour",
        "--device-hours-column COLUMN": "column with cumulative device-hours (default: device_seconds, if the file has it)",
    },
}
_JSON: Final = {"-o --output": "json: for scripts"}
_CHECKPOINT: Final = {"--step N": "step of a kept checkpoint (default: the newest)"}
_ROLES: Final = [str(role) for role in Role if role is not Role.FORECASTER]
_ON_CLUSTER: Final = "clusters.session:run_cluster_command"

_COMMANDS: Final[Mapping[str, Options]] = {
    "run run:run": {
        "help": "run a ScaleRLRun on this machine",
        "file FILE": "run file (YAML)",
        "--dir DIR": "run directory (default: runs/NAME-N)",
        "--resume": "resume the run in DIR (default: the newest runs/NAME-N); for fields of FILE that may change, see docs/operations.md",
        "--pin ROLE=CPUS": "pin a role to CPUs, such as --pin trainer=0 --pin generator=1,2 (for benchmarks)",
        "--runtime NAME": "what runs its processes: a runtime of an installed package (default: this machine)",
    },
    "validate validate:validate": {
        "help": "validate run files and list all problems",
        "files FILE": "",
        "--any-machine": "skip the checks of devices and memory of this machine",
        "--show": "print every value of the recipe with its origin",
        "--memory": "print what each role and rank allocates, by ZeRO stage, and the lowest stage that fits",
    },
    "data data:run_data": {
        "help": "show what a run would read of its data, and check the answers",
        "files FILE": "run file (YAML), or data files (.jsonl, .json, .csv, .parquet, .arrow)",
        "--column FIELD=EXPRESSION": "of data files: where a field is, such as answer=reward_model.ground_truth",
        "--answer-pattern PATTERN": "of data files: task.dataset.answerPattern",
        "--where EXPRESSION": "of data files: task.dataset.filter.where",
        "--verifier NAME": "of data files: verifier of the check (default: number or math-verify)",
        "--model DIR": "folder with the tokenizer (default: model.path of the run file)",
    },
    "rollouts rollouts:run_rollouts": {
        "help": "read the recorded rollouts of a run: prompts, completions, rewards",
        "description": "Show rollouts of the run in DIR, of which the run records a sample (spec.rollouts). A range is N, N:M, N: or :M, "
        "with both ends. All conditions must hold.",
        "dir DIR": "",
        **ROLLOUT_CONDITIONS,
        "--full": "show long texts whole; with --json also the columns of tokens",
        "--json": "print JSON objects, one a line",
    },
    "status results:run_status": {"help": "say in one sentence what is wrong first in a run", "dir DIR": ""},
    "view page.command:run_view": {
        "help": "show runs as a local web page: curves, metrics, rollouts, decisions, a timeline",
        "description": "Serve a page of the runs in DIRs on this machine, also while they go on. Nothing is written into DIRs.",
        "dirs DIR": "directory of a run, or NAMESPACE/NAME of a run on a cluster",
        "--port N": "port on the loopback address (default: the first free one from 8660 on)",
        "--perfetto FILE": "instead write the timeline of the run for Perfetto (JSON of Chrome's traces)",
        "--context NAME": "of a run on a cluster: context of the kubeconfig",
        "--kubeconfig FILE": "of a run on a cluster: kubeconfig, as in kubectl",
        "--image IMAGE": "of a run without pods: as of scalerl fetch",
    },
    "score score:run_score": {
        "help": "score given completions by the verifier of a run",
        "file FILE": "run file (YAML)",
        "--completions FILE": 'JSON lines: {"id": or "prompt": of a prompt of the run, "completion": or "completions":}; with "answer", '
        "a prompt of its own",
        "--task NAME": "task of a mix, or evaluation set (default: the first)",
    },
    "plot results:plot": {"help": "plot DIR/curve.csv as DIR/curve.png", "dir DIR": ""},
    "export results:export": {
        "help": "export the model of a checkpoint in Hugging Face format",
        "dir DIR": "run directory",
        "--to PATH": "output directory; must not exist",
        **_CHECKPOINT,
    },
    "fork fork:fork": {
        "help": "start a new run from a checkpoint of another",
        "description": "On this machine: make the directory of a new run from a checkpoint of RUN, the directory of another, for "
        "`scalerl run --resume`. On a cluster: print the run file of a fork of the run with the name RUN, for `scalerl submit -`.",
        "source RUN": "directory of a run, or name of a run on a cluster",
        **_CHECKPOINT,
        "--out DIR": "directory of the new run (default: runs/NAME-N)",
        "--name NAME": "name of the new run (default: that of FILE, or RUN-fork)",
        "-f --file FILE": "run file of the new run (default: the source's spec)",
        "--set FIELD=VALUE": "change a field of the spec, such as --set recipe.optimizer.learningRate=1e-5",
        **_CONNECTION,
    },
    "replay replay:replay": {
        "help": "recompute the recorded decisions of the autoscaler",
        "source DIR|FILE": "run directory or its decisions.jsonl (- for standard input; on a cluster: kubectl exec -c coordinator "
        "NAME-coordinator-0 -- cat /run/scalerl/run/decisions.jsonl | scalerl replay -)",
        "--policy FILE": "run file with another spec.autoscaling: show the decisions that would differ",
    },
    "compare compare:run_compare": {
        "help": "run recipes and compare their curves: A, B, reward at equal compute",
        "description": "Run each spec, variant and seed sequentially, and compare all with the first one by the paper's rule. Finished "
        "runs are reused; interrupted or failed runs are resumed. docs/forecast.md explains every number.",
        "what SPEC|RUN": "run file (.yaml) to run; or a curve: a run directory, a file as for `scalerl fit`, or the name of a run on a "
        "cluster, if there is no such file",
        "--vary [LABEL:]FIELD=VALUE[;...]": "add a variant of each spec: 'dapo loss: recipe.loss={ppoClip: {clipHigh: 0.26}}'; repeatable",
        "--seeds N": "number of seeds of each: seed, seed + 1, ... (default: 1)",
        "--dir DIR": "directory for the runs, comparison.md, .csv and .png (default: compare)",
        **_COLUMNS,
        **_CONNECTION,
    },
    "fit curves:run_fit": {
        "help": "fit a compute-reward curve and forecast it",
        "description": "Fit R(C) = R0 + (A - R0) / (1 + (Cmid/C)^B) to a curve and forecast it. docs/forecast.md explains every number.",
        "curve CURVE.csv": _CURVE,
        "--at C": "also forecast at this total compute",
        "--target T": "forecast the compute at which this reward is reached",
        "--budget C": "total compute available",
        "--log": "plot compute on a logarithmic axis",
        **_ANALYSIS,
    },
    "plan curves:run_plan": {
        "help": "predict reward, cost and date for more compute",
        "description": "Expected reward of each option: stop now, continue to 2x or 4x the compute, or spend a budget. docs/forecast.md "
        "explains every number.",
        "--from CURVE.csv": _CURVE,
        "--budget DEVICE_HOURS": "additional device-hours",
        "--price P": "price of a device-hour",
        "--value-per-point V": "value of one point of reward (.01, or a hundredth of --scale), in the currency of --price",
        "--devices N": "current number of devices (default: measured from device_seconds and wall_seconds)",
        "--generators N,N,...": "numbers of generators to compare; the first is the current one",
        "--elasticity E": "d ln(compute per hour)/d ln(devices) (default: measured, if the number of devices has changed)",
        "--devices-per-generator N": "default: 1",
        **_ANALYSIS,
    },
    "report report:run_report": {
        "help": "show rewards and pass@k by label of the prompts, such as their difficulty",
        "description": "Tabulate and plot the newest evaluations of runs by label of the prompts (DIR/labels.csv), into report.md, .csv "
        "and .png. docs/tasks.md lists the prompts that have labels.",
        "runs [NAME=]DIR": "run directory; runs with the same NAME are averaged, such as seeds of one recipe",
        "--set NAME": "only this evaluation set",
        "--label NAME": "only this label, such as difficulty",
        "--to DIR": "output directory (default: the run directory; report for several runs)",
    },
    f"get {_ON_CLUSTER}": {
        "help": "list the runs of a cluster",
        "description": "List runs on a cluster.",
        "name [NAME]": "only this run",
        "-A --all-namespaces": "in all namespaces",
        "--ended": "the records of runs that were deleted",
        **_JSON,
        **_CONNECTION,
    },
    f"why {_ON_CLUSTER}": {
        "help": "say what a run on a cluster waits for, and what to do",
        "name NAME": "",
        **_JSON,
        **_CONNECTION,
    },
    f"logs {_ON_CLUSTER}": {
        "help": "print the logs of a run's pods on a cluster",
        "name NAME": "",
        "role [ROLE]": f"only {', '.join(_ROLES)}",
        "-f --follow": "wait for more lines, until the pods end",
        "-p --previous": "of each container's previous start",
        "--tail N": "only the last N lines of each container",
        **_CONNECTION,
    },
    f"fetch {_ON_CLUSTER}": {
        "help": "copy curve, model or rollouts of a run on a cluster to this machine",
        "description": "Copy files of a run to this machine, with checksums. An interrupted copy goes on when it is repeated. "
        "docs/clusters.md lists the rights that each needs.",
        "name NAME": "",
        "what": "",
        "-o --to DIR": "directory (default: this one)",
        _EITHER: {
            "--last": "the model of the last evaluation (default: of the best)",
            "--step N": "the exported model of step N",
        },
        "--image IMAGE": "image of the pod that reads the volume of a run without pods; any with sh, find, stat, dd, head, tail and "
        "sha256sum (default: that of the run)",
        **_CONNECTION,
    },
    f"submit {_ON_CLUSTER}": {
        "help": "validate run files and apply them to a cluster",
        "description": "Validate FILE as `scalerl validate` does, try it on the API server (dry run), and apply it (server-side). "
        "Nothing is applied if one document is refused. Nothing is uploaded: paths in the spec are paths in the pods.",
        "manifests FILE": "YAML, also with several documents; - is standard input",
        "--dry-run": "do not apply",
        "--force-conflicts": "take fields over from other writers, such as kubectl edit",
        **_CONNECTION,
    },
}
"""The arguments, help and description of each command, by its name and its function, which is imported when it is used."""

_PATHS: Final = ("DIR", "FILE", "PATH", "DIR|FILE", "SPEC|RUN", "CURVE.csv", "OUT.png")
"""Metavars of paths."""
_REPEATABLE: Final = {"action": "append", "default": []}
_POSITIVE: Final = {"type": types.positive}
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "files FILE": {"nargs": "+"},
    "dirs DIR": {"nargs": "+"},
    "what SPEC|RUN": {"nargs": "+"},
    "runs [NAME=]DIR": {"nargs": "+"},
    "manifests FILE": {"nargs": "+", "type": str},
    "--kubeconfig FILE": {"type": str},
    "--completions FILE": {"required": True},
    "--to PATH": {"required": True},
    "--from CURVE.csv": {"required": True, "dest": "curve"},
    "-o --to DIR": {"default": Path()},
    "--pin ROLE=CPUS": _REPEATABLE,
    "--column FIELD=EXPRESSION": _REPEATABLE,
    "--where EXPRESSION": _REPEATABLE,
    "--set FIELD=VALUE": _REPEATABLE,
    "--vary [LABEL:]FIELD=VALUE[;...]": _REPEATABLE,
    "--label NAME=VALUE": _REPEATABLE | {"type": types.text_argument},
    "--contains TEXT": _REPEATABLE | {"type": types.text_argument},
    "--prompt ID": {"type": types.text_argument},
    "--step RANGE|last": {"type": types.step_interval},
    "--split": {"choices": ("train", "held-out")},
    "--sample N": {"type": types.whole},
    "--reward RANGE": {"type": types.interval},
    "--excluded REASON": {"nargs": "?", "const": ""},
    "--sort": {"choices": SORTS, "default": "step"},
    "--limit N": {"type": types.whole, "default": 100},
    "--port N": {"type": types.port},
    "--step N": {"type": int},
    "--seeds N": {"type": types.positive_whole, "default": 1},
    "--resumed": {"choices": ["KeepLast"]},
    "--scale LOW,HIGH": {"type": types.scale, "default": (0.0, 1.0)},
    "--prior RUN": {"type": Path, "nargs": "+", "action": "extend", "default": []},
    "--late-rises": {"choices": ["language_models", "games"], "default": "language_models"},
    "--at C": _POSITIVE | {"nargs": "+", "default": []},
    "--target T": {"type": float},
    "--budget C": _POSITIVE,
    "--budget DEVICE_HOURS": _POSITIVE | {"nargs": "+", "default": []},
    "--price P": {"type": types.not_negative},
    "--value-per-point V": {"type": types.not_negative},
    "--devices N": _POSITIVE,
    "--generators N,N,...": {"type": types.counts, "default": []},
    "--elasticity E": _POSITIVE,
    "--devices-per-generator N": {"type": types.positive, "default": 1.0},
    "--rate C_PER_DEVICE_HOUR": _POSITIVE,
    "name [NAME]": {"nargs": "?", "metavar": "NAME"},
    "role [ROLE]": {"nargs": "?", "metavar": "ROLE", "choices": _ROLES},
    "--tail N": {"type": types.whole},
    "what": {"choices": ("curve", "model", "rollouts")},
    "-o --output": {"choices": ["text", "json"], "default": "text"},
}
"""What ``add_argument`` takes besides names, metavar and help. An option with neither a metavar nor a row here is a flag."""


def add_commands(commands: Commands) -> None:
    """Add all commands of this package."""
    for words, options in _COMMANDS.items():
        name, function = words.split()
        texts = {text: options[text] for text in ("help", "description") if text in options}
        command = commands.add_parser(name, **texts)
        command.set_defaults(function=f"scalerl_cli.{function}")
        add_options(command, {words: text for words, text in options.items() if words not in texts})


def add_options(command: argparse._ActionsContainer, options: Options) -> None:
    """Add the arguments of a table."""
    for words, text in options.items():
        if isinstance(text, Mapping):
            either = words == _EITHER
            group = command.add_mutually_exclusive_group() if either else command.add_argument_group(words)
            add_options(group, text)
            continue
        names, given = words.split(), dict(_SETTINGS.get(words, {}))
        if len(names) > 1 and not names[-1].startswith("-"):
            metavar = names.pop()
            given = {"metavar": metavar, "type": Path if metavar in _PATHS else None} | given
        elif not given and words.startswith("-"):
            given["action"] = "store_true"
        command.add_argument(*names, help=text, **given)
