"""The reward curve of a run with its forecast, as JSON values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_analysis.curve_file import CurveFile, read_curve
from scalerl_analysis.fit_text import fit_report
from scalerl_analysis.fitted_curve import FittedCurve, State, fit_curve
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.table import interval_json
from scalerl_curvefit import draws

_GRID: Final = 120


def curve(path: Path) -> dict[str, Any]:
    """Points, bands, forecast and the reasons of its width; ``problem`` says what is missing, ``ends`` when evaluations ended."""
    if not path.exists():
        return {"points": [], "ends": {}, "problem": "no evaluation has ended yet"}
    try:
        file = read_curve(path)
    except AnalysisProblem as problem:
        return {"points": [], "ends": {}, "problem": _local(problem, path)}
    found: dict[str, Any] = {"points": _points(file), "unit": file.unit, "ends": _ends(file)}
    try:
        made = fit_curve(file)
        return found | _fitted(made)
    except AnalysisProblem as problem:
        return found | {"problem": _local(problem, path)}


def other_curves(paths: Iterable[Path]) -> dict[str, list[tuple[float, ...]]]:
    """Points of other evaluation sets, by the name of the set; those of a file that is no curve are left out."""
    found = {}
    for path in paths:
        with contextlib.suppress(AnalysisProblem):
            found[path.stem.removeprefix("curve-")] = _points(read_curve(path))
    return found


def _points(file: CurveFile) -> list[tuple[float, ...]]:
    """Compute, reward and version of each evaluation."""
    versions = file.version if file.version is not None else np.zeros(len(file.curve))
    return list(zip(file.curve.compute.tolist(), file.curve.reward.tolist(), versions.tolist(), strict=True))


def _ends(file: CurveFile) -> dict[int, float]:
    """Seconds of the run at the end of the evaluation of each version."""
    if file.version is None or file.wall_hours is None:
        return {}
    return dict(zip(file.version.astype(int).tolist(), (3600 * file.wall_hours).tolist(), strict=True))


def _local(problem: AnalysisProblem, path: Path) -> str:
    return str(problem).removeprefix(f"{path}: ")


def _fitted(made: FittedCurve) -> dict[str, Any]:
    broken = made.state is State.BROKEN
    grid = np.linspace(made.first, made.now if broken else made.twice, _GRID)
    found = {
        "state": str(made.state),
        "grid": grid.tolist(),
        "bands": made.scale.level(made.bands(grid)).tolist(),
        "now": made.now,
        "text": "\n".join(fit_report(made)),
        "why": list(made.collapse_check.reasons) if broken else list(_why(made)),
    }
    if not broken:
        ahead = made.forecasts[0]
        found["forecast"] = {"compute": ahead.compute, **interval_json(made.scale.levels(ahead))}
        found["asymptote"] = interval_json(made.scale.levels(made.fitted.A))
    return found


def _why(made: FittedCurve) -> Iterator[str]:
    """Sentences on the width of the forecast at 2×, part by part, and the warnings."""
    ahead, scale = made.forecasts[0], made.scale
    at = np.array([made.twice - made.start])
    parameters = np.asarray(np.quantile(draws(made.fitted).reward(at)[:, 0], (0.05, 0.95)))
    curve = made.bands(np.array([made.twice]))[[0, 4], 0]
    widths = [scale.level(float(high)) - scale.level(float(low)) for low, high in (parameters, curve)]
    whole = scale.level(ahead.high) - scale.level(ahead.low)
    points = made.fitted.points_used
    yield (
        f"the 90 % interval at twice the compute is {whole:.3f} wide. The parameters of the curve, from {points} evaluations, "
        f"leave {widths[0]:.3f}; with the departures from the curve, those that the newest evaluations show and those that may come, "
        f"it is {widths[1]:.3f}; the rest is the noise of a single evaluation"
    )
    yield from (warning.replace("interval of A ", "interval of the asymptote ") for warning in made.warnings)
