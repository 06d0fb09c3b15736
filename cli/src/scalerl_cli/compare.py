"""``scalerl compare``: makes the missing runs, and compares all recipes in one table and one picture."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scalerl_api.load import SpecError
from scalerl_api.paths import RunPaths
from scalerl_api.spec_warnings import warnings_of
from scalerl_api.wire import BROKEN, INTERRUPTED
from scalerl_cli import exits
from scalerl_cli.exits import Refused
from scalerl_cli.output import echo, replace_text
from scalerl_cli.run import read_spec, run_spec
from scalerl_cli.variants import Planned, Variant, changed_defaults, earlier_spec, parse_variant, planned

if TYPE_CHECKING:
    from scalerl_analysis.comparison import Recipe

SPECS: Final = (".yaml", ".yml")
"""Suffixes of spec files; every other argument is an existing curve."""
TABLES: Final = (".csv", ".json", ".jsonl", ".parquet", ".tsv")
"""Suffixes of files with curves, which are not taken for runs of a cluster."""
_RUN_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""A name of a run on a cluster."""
_CLUSTER_SECONDS: Final = (3.0, 10.0)
"""Timeouts of a connection and of a response: the name may be a mistyped path."""
FAILED: Final = "failed: "
"""Prefix of the ``stop_reason`` of a failed run."""

Runner = Callable[[Planned, Path, bool], int]
"""Executes a run in a directory, resuming it if the flag is set; returns the exit code."""


@dataclass
class Member:
    """A recipe of the comparison: runs to make, or an existing curve."""

    label: str
    runs: list[Planned] = field(default_factory=list)
    """Runs of a spec, one for each seed; empty for an existing curve."""
    curve: Path | None = None
    """File of an existing curve, or the directory of its run; None for a spec."""


def run_compare(arguments: argparse.Namespace, runner: Runner | None = None) -> int:
    """Make the missing runs, compare, and write ``comparison.md``, ``.csv`` and ``.png``; returns the exit code.

    Args:
        runner: replaces ``scalerl run`` in tests.
    """

    def run_planned(plan: Planned, directory: Path, resume: bool) -> int:
        return exits.exit_code(
            lambda: run_spec(plan.run, directory, arguments.planner, time.monotonic(), resume=resume)
        )

    arguments.dir = arguments.dir or Path("compare")
    members = _members(arguments)
    directories = _run_all(members, arguments.dir, runner or run_planned)
    return _report(members, directories, arguments)


def _members(arguments: argparse.Namespace) -> list[Member]:
    """The recipes, in the order of the arguments; checks all specs before the first run starts."""
    problems: list[str] = []
    variants: list[Variant | None] = [None]
    for text in arguments.vary:
        try:
            variants.append(parse_variant(text))
        except Refused as problem:
            problems.append(str(problem))
    specs = [path for path in arguments.what if path.suffix in SPECS and not path.is_dir()]
    if not specs and (arguments.vary or arguments.seeds != 1):
        problems.append("--vary and --seeds apply to spec files, and none is given")
    members: list[Member] = []
    for path in arguments.what:
        if path not in specs:
            if (path / "curve.csv" if path.is_dir() else path).is_file():
                unique = [other.name for other in arguments.what].count(path.name) == 1
                members.append(Member(path.name if unique else str(path), curve=path))
            else:
                members.append(Member(str(path), curve=_fetched(path, arguments, problems)))
            continue
        for variant in variants:
            try:
                members.append(_runs(path, variant, arguments.seeds, alone=len(specs) == 1))
            except (Refused, SpecError) as refused:
                problems += str(refused).splitlines() if isinstance(refused, SpecError) else refused.args
    seen: dict[str, str] = {}
    warnings: list[str] = []
    for member in members:
        for plan in member.runs:
            label = f"{member.label} (seed {plan.run.spec.seed})"
            if plan.digest in seen:
                problems.append(f"{label} is the same run as {seen[plan.digest]}: remove one")
            seen[plan.digest] = label
            warnings += [f"{plan.run.metadata.name}: warning: {one}" for one in warnings_of(plan.run.spec)]
    if problems:
        raise Refused(*dict.fromkeys(problems))
    for line in dict.fromkeys(warnings):  # most variants have the same warnings
        echo(line, error=True)
    return members


def _fetched(path: Path, arguments: argparse.Namespace, problems: list[str]) -> Path:
    """The curve of a run on a cluster, as a file in ``--dir``. A name with a slash or a suffix of a table is no run's."""
    name = str(path)
    target: Path = arguments.dir / "curves" / f"{name}.csv"
    if path.exists() or not _RUN_NAME.fullmatch(name) or path.suffix in TABLES:
        problems.append(f"{path}: neither a spec (.yaml), nor a curve or a directory of a run")
        return path
    from scalerl_analysis.problem import AnalysisProblem
    from scalerl_cli.clusters.fetch import curve
    from scalerl_cli.clusters.runs import find
    from scalerl_cli.clusters.session import ClusterProblem, explained, open_session
    from scalerl_operator.kube import errors

    where = "a cluster"
    try:
        session = open_session(arguments, seconds=_CLUSTER_SECONDS, retries=0)
        where = f"the namespace {session.namespace}"
        echo(f"{path}: no such file; asking for the run of that name in {where}", error=True)
        table, _ = curve(session, find(session, name))
        replace_text(target, table)
    except (errors.ApiError, ClusterProblem, AnalysisProblem, OSError) as error:
        why = error if isinstance(error, AnalysisProblem | OSError) else explained(error)
        problems.append(f"{path}: no such file, and no run of that name in {where}: {why}")
    return target


def _runs(path: Path, variant: Variant | None, seeds: int, *, alone: bool) -> Member:
    """A recipe with its seeds. alone: this is the only spec, so the label of a variant identifies the recipe."""
    run = read_spec(path, variant.changes if variant else None)
    name = run.metadata.name if alone else f"{run.metadata.name} ({path})"
    label = name if variant is None else variant.label if alone else f"{name}, {variant.label}"
    member = Member(label)
    for seed in range(run.spec.seed, run.spec.seed + seeds):
        seeded = run.model_copy(update={"spec": run.spec.model_copy(update={"seed": seed})})
        try:
            member.runs.append(planned(seeded, label, variant))
        except OSError as error:
            raise Refused(f"{path}: {error}") from error
    return member


def _run_all(members: Sequence[Member], parent: Path, runner: Runner) -> dict[str, Path]:
    """Make the missing and unfinished runs, one after the other; returns the directory of each run, by digest.

    Raises:
        Refused, DirectoryProblem: a run cannot be resumed, or the user interrupted one, which ends the whole comparison.
    """
    plans = [plan for member in members for plan in member.runs]
    names = frozenset(plan.name for plan in plans)
    directories = {plan.digest: parent / plan.name for plan in plans}
    for plan in plans:
        directory = directories[plan.digest]
        changed = changed_defaults(plan, directory) if RunPaths(directory).run_file.exists() else ""
        if changed:
            raise Refused(
                f"{directory}: made by a release with other defaults ({changed}); write these fields into the spec as they "
                "were, or choose another --dir"
            )
    for number, plan in enumerate(plans, 1):
        directory = directories[plan.digest]
        head = f"{number} of {len(plans)}: {plan.recipe}, seed {plan.run.spec.seed}"
        if _is_finished(directory):
            echo(f"{head}: already finished, in {directory}")
            continue
        resume = RunPaths(directory).run_file.exists()
        changed = "" if resume else earlier_spec(plan, parent, names)
        echo(f"{head}: {'resumed' if resume else 'new'}{changed and f', for {changed}'}")
        if runner(plan, directory, resume) == exits.INTERRUPTED:
            text = "the comparison is interrupted; the same command resumes it"
            raise Refused(text, code=exits.INTERRUPTED)
    return directories


def _stop_reason(directory: Path) -> str:
    """Reason why the run ended; empty if it has not ended."""
    try:
        summary = json.loads(RunPaths(directory).summary.read_text(encoding="utf-8"))
        return str(summary["stop_reason"])
    except (OSError, ValueError, KeyError):
        return ""


def _is_finished(directory: Path) -> bool:
    """Whether the run has its result. A failed run is retried; a run that is suspended as broken is not."""
    reason = _stop_reason(directory)
    return bool(reason) and reason != INTERRUPTED and not reason.startswith(FAILED)


def _report(members: Sequence[Member], directories: dict[str, Path], arguments: argparse.Namespace) -> int:
    from scalerl_analysis.comparison import Comparison
    from scalerl_analysis.pictures import draw_comparison
    from scalerl_analysis.reward_scale import RewardScale

    recipes = tuple(_recipe(member, directories, arguments) for member in members)
    compared = Comparison(recipes, RewardScale(*arguments.scale))
    parent: Path = arguments.dir
    written = [parent / f"comparison.{suffix}" for suffix in ("md", "csv", "png")]
    table = compared.table()
    findings, notes = ([*map(exits.options_named, part)] for part in (compared.findings(), compared.notes()))
    items = [f"{'  ' if line.startswith(' ') else ''}- {line.strip()}" for line in findings]
    lines = [*table.markdown(), "", *items, "", *(f"- {note}" for note in notes)]
    replace_text(written[0], "\n".join(lines) + "\n")
    replace_text(written[1], compared.csv())
    echo()
    for line in (*table.lines(), "", *findings, "", *notes):
        echo(line)
    if any(file.curve.compute[-1] > 0 for file in compared.files):
        draw_comparison(compared, written[2])
    else:
        written.pop()
    echo(f"written: {', '.join(map(str, written))}")
    suspended = [directory for directory in directories.values() if _stop_reason(directory) == BROKEN]
    for directory in suspended:
        echo(f"{directory} is suspended, because it was found broken", error=True)
    return exits.FAILED if suspended or any(recipe.failures for recipe in recipes) else exits.DONE


def _recipe(member: Member, directories: dict[str, Path], arguments: argparse.Namespace) -> Recipe:
    """Curves and fits of the runs of a recipe; leaves out failed runs and runs without a usable curve."""
    from scalerl_analysis.comparison import read_recipe
    from scalerl_cli.curves import columns_of

    made = [directories[plan.digest] for plan in member.runs]
    paths = [member.curve] if member.curve else [path for path in made if _is_finished(path)]
    unknown = "failed before its first step; the reason was printed above"
    reasons = [f"{path.name}: {_stop_reason(path) or unknown}" for path in made if not _is_finished(path)]
    return read_recipe(member.label, paths, columns_of(arguments), reasons)
