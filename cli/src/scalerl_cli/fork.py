"""``scalerl fork``: a new run that continues from a checkpoint of another, on this machine or on a cluster."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalerl_api.fork import Fork
from scalerl_api.load import SpecError, SpecProblem, parse_run, to_yaml
from scalerl_api.spec import ForkSpec, ScaleRLRun
from scalerl_cli.exits import DONE, FAILED, Refused
from scalerl_cli.inputs import load
from scalerl_cli.output import echo
from scalerl_cli.run import RUNS
from scalerl_cli.variants import parse_variant
from scalerl_local.run_directory import DirectoryProblem, next_directory, stored_manifest


def fork(arguments: argparse.Namespace) -> int:
    """Fork the run in a directory, or the run of a cluster with that name; returns the exit code."""
    if Path(arguments.source).is_dir():
        return _fork_directory(arguments, Path(arguments.source))
    if "/" in arguments.source:
        raise Refused(f"{arguments.source}: no such directory")
    from scalerl_cli.clusters.session import run_cluster_command

    return run_cluster_command(arguments)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of ``--set``, by path in ``spec``.

    Raises:
        SpecError: one has another form.
    """
    changes: dict[str, Any] = {}
    for text in arguments.set:
        try:
            changes |= parse_variant(text).changes
        except Refused as problem:
            raise SpecError("fork", [SpecProblem("--set", str(problem).replace("--vary ", ""))]) from problem
    return changes


def forked(run: ScaleRLRun, source: str, name: str | None, step: int | None) -> ScaleRLRun:
    """``run`` as a fork of ``source``.

    Raises:
        SpecError: the name cannot be that of a run.
    """
    manifest = run.to_manifest()
    manifest["metadata"]["name"] = fork_name(run.metadata.name, source, name)
    manifest["spec"]["from"] = ForkSpec(run=source, step=step).model_dump(by_alias=True, exclude_none=True)
    return parse_run(to_yaml(manifest), f"the fork of {source}")


def fork_name(given: str, source: str, name: str | None) -> str:
    """Name of the fork: ``name`` of the command line, else that of the run file if it is another than the source's.

    >>> fork_name("math", "math", None)
    'math-fork'
    """
    return name or (given if given != source else f"{source}-fork")


def _fork_directory(arguments: argparse.Namespace, source: Path) -> int:
    if find_spec("scalerl_trainer") is None:
        raise Refused(
            "the fork of a directory needs the trainer's packages: use the trainer's image, or `make setup`"
        )
    from scalerl_trainer.fork import ForkError, fork_directory

    try:
        source_name = str(stored_manifest(source)["metadata"]["name"])
        file = arguments.file or source / "run.yaml"
        run = forked(load(file, changes_of(arguments)), source_name, arguments.name, arguments.step)
        target: Path = arguments.out or next_directory(RUNS, run.metadata.name)

        def run_file(origin: Fork) -> str:
            return to_yaml(forked(run, origin.run, run.metadata.name, origin.step).to_manifest())

        origin = fork_directory(source.resolve(), target, run.spec, arguments.step, run_file)
    except (DirectoryProblem, ForkError) as error:
        raise Refused(str(error)) from error
    except OSError as error:
        text = f"{error.filename or source}: {error.strerror or error}; nothing was made"
        raise Refused(text, code=FAILED) from error
    echo(f"step {origin.step} of {origin.run} is in {target}")
    echo(f"continue with: scalerl run {target / 'run.yaml'} --resume --dir {target}")
    return DONE
