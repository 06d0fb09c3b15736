"""Earlier runs for the prior of a fit, and those that cannot be used, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scalerl_analysis.curve_columns import Columns
from scalerl_analysis.curve_file import CurveFile, read_curve
from scalerl_analysis.problem import AnalysisProblem
from scalerl_api.comparable import comparable
from scalerl_api.forecast import MAX_EARLIER_RUNS
from scalerl_api.load import SpecError, load_accepted_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_curvefit import EarlierRun


@dataclass(frozen=True, eq=False)
class Prior:
    """The earlier runs that were given."""

    runs: tuple[EarlierRun, ...] = ()
    """Runs for the fit."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Name and reason of each other run, in the order given."""


def read_prior(paths: Sequence[Path], file: CurveFile, columns: Columns) -> Prior:
    """Read the runs at ``paths``, directories or files as for ``read_curve``, as a prior for the run of ``file``.

    Raises:
        AnalysisProblem: none of them can be used; the message has the reason for each.
    """
    found: list[tuple[float, str, CurveFile]] = []
    left_out: dict[str, str] = {}
    spec = _spec(file.path.parent) if paths and file.path.name == "curve.csv" else None
    seen: dict[Path, Path] = {}
    for path in dict.fromkeys(paths):
        try:
            curve = (path / "curve.csv" if path.is_dir() else path).resolve()
            if (same := seen.setdefault(curve, path)) != path:
                raise AnalysisProblem(f"the same run as {same}")
            earlier = _earlier(path, file, spec, columns)
            found.append((earlier.path.stat().st_mtime, str(path), earlier))
        except (AnalysisProblem, OSError) as problem:
            left_out[str(path)] = str(problem)
    newest = {name for _, name, _ in sorted(found, key=lambda one: one[0])[-MAX_EARLIER_RUNS:]}
    left_out |= {
        name: f"older than {MAX_EARLIER_RUNS} others, which are used"
        for _, name, _ in found
        if name not in newest
    }
    runs = tuple(EarlierRun(name, one.segment.curve) for _, name, one in found if name in newest)
    if not runs and paths:
        raise none_counts(left_out.items())
    ordered = [(str(path), left_out[str(path)]) for path in dict.fromkeys(paths) if str(path) in left_out]
    return Prior(runs, tuple(ordered))


def none_counts(left_out: Iterable[tuple[str, str]]) -> AnalysisProblem:
    """The error for earlier runs, as name and reason, none of which can be used."""
    reasons = [f"  {name}: {reason}" for name, reason in left_out]
    return AnalysisProblem(
        "\n".join([f"`prior`: none of the {len(reasons)} given runs can be used:", *reasons])
    )


def _earlier(path: Path, file: CurveFile, spec: RunSpec | None, columns: Columns) -> CurveFile:
    """Read an earlier run; raises AnalysisProblem with the reason if it cannot be used."""
    if (path / "curve.csv" if path.is_dir() else path).resolve() == file.path.resolve():
        raise AnalysisProblem("the run itself")
    earlier = read_curve(path, replace(columns, device_hours=None))
    if (earlier.segment.start > 0) != (file.segment.start > 0):
        raise AnalysisProblem("compute counts from a change of recipe in only one of the two runs")
    if earlier.named_unit and file.named_unit and earlier.unit != file.unit:
        raise AnalysisProblem(f"its compute is in {earlier.unit}, this run's in {file.unit}")
    if spec is not None and earlier.path.name == "curve.csv":
        other = _spec(earlier.path.parent)
        if other is not None and (differs := comparable(other, spec)):
            raise AnalysisProblem(differs)
    return earlier


def _spec(directory: Path) -> RunSpec | None:
    """Spec of the run in a directory; None without a run file: then the user is responsible for the same task and model.

    Raises:
        AnalysisProblem: the run file cannot be read.
    """
    file = RunPaths(directory).run_file
    if not file.exists():
        return None
    try:
        return load_accepted_run(file).spec
    except SpecError as error:
        raise AnalysisProblem(f"{file}: {error}") from error
