"""``scalerl validate``: lists every problem of every file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from scalerl_api.compute import rl_token_cost, rl_tokens, supervised_tokens
from scalerl_api.load import SpecError, SpecProblem
from scalerl_api.recipe.resolve import resolve
from scalerl_api.spec import RunSpec
from scalerl_api.spec_warnings import local_warnings_of, warnings_of
from scalerl_cli import inputs
from scalerl_cli.exits import BAD_INPUT, DONE
from scalerl_cli.output import echo


def validate(arguments: argparse.Namespace) -> int:
    """Print each problem on a line, or ``ok`` for a file without any; returns the exit code."""
    files: Sequence[Path] = arguments.files
    bad = 0
    for file in files:
        found = problems(file, any_machine=arguments.any_machine)
        bad += bool(found)
        for problem in found:
            echo(f"{file}: {problem}", error=True)
        try:
            spec = inputs.load(file).spec
        except SpecError:  # which is among the problems
            continue
        _show(file, spec, arguments, usable=not found)
    if bad and len(files) > 1:
        echo(f"{bad} of {len(files)} files cannot be used", error=True)
    return BAD_INPUT if bad else DONE


def _show(file: Path, spec: RunSpec, arguments: argparse.Namespace, *, usable: bool) -> None:
    """Print about a spec: the plan of allocations also of one that does not fit, the rest of one without problems."""
    # Without the trainer's packages, model_problems() says that they are missing.
    if arguments.memory and find_spec("scalerl_trainer") is not None:
        from scalerl_cli.memory_plan import memory_lines

        for line in memory_lines(spec):
            echo(line)
    if not usable:
        return
    # With an image, it is for a cluster.
    is_local = spec.environment is not None and spec.environment.image is None
    for warning in (*warnings_of(spec), *(local_warnings_of(spec) if is_local else ())):
        echo(f"{file}: warning: {warning}", error=True)
    if arguments.show:
        recipe = resolve(spec.recipe)
        echo(f"{file}: recipe {recipe.preset}")
        for line in (*(f"  {choice.field}: {choice}" for choice in recipe.choices), *split_lines(spec)):
            echo(line)
    echo(f"{file}: ok")


def split_lines(spec: RunSpec) -> list[str]:
    """Lines with the share of each stage in ``budget.maxComputeTokens``; empty without a split."""
    budget, first, rest = spec.budget, supervised_tokens(spec.budget), rl_tokens(spec.budget, spec.recipe)
    if budget.split is None or first is None or rest is None:
        return []
    cost = rl_token_cost(spec.recipe)
    return [
        f"  budget.maxComputeTokens: {budget.max_compute_tokens:,}, split at beta {budget.split.beta}",
        f"    mid-training  {first:,} solution tokens × 1 = {first:,}",
        f"    RL            {float(rest):,.0f} completion tokens × {cost} = {float(rest * cost):,.0f}",
    ]


def problems(file: Path, *, any_machine: bool = False) -> list[SpecProblem]:
    """All problems of one file."""
    try:
        return inputs.problems(inputs.load(file), thorough=True, machine=not any_machine)
    except SpecError as error:
        return error.problems
