"""Analysis of finished runs, and of those that go on: curves and their fits, comparisons, costs, tables, rollouts, pictures.

From a file to text, JSON and picture::

    read_curve()     curve_formats.read_table() rows ▶ curve_columns.choose() the columns to use ▶ checked points: CurveFile
    read_prior()     earlier runs, or why one is not used
    fit_curve()      the fit, the check for collapse, the forecasts: FittedCurve ▶ fit_report() text, .as_json(), draw_fit() PNG
    ├ plan()         options, their costs and gains: Plan ▶ plan_report(), plan_json(), draw_plan()
    └ compare()      read_recipe() the fits of its runs ▶ the rule of curvefit: Comparison ▶ .table(), .findings(), draw_comparison()

From the other files of a run: ``MetricSeries.read()`` (``metrics.jsonl``), ``find_rollouts()`` (recorded rollouts), ``Timeline.read()``
(with ``trace.jsonl``: what trainer and generators did when), and the tables
``task_table()`` and ``turn_table()`` (of metrics), ``label_table()`` (``labels.csv``) and ``epoch_table()`` (``history.jsonl``). A ``Table`` has
``rows``, and texts for people, Markdown, CSV and JSON.

This package contains no statistics of curves: every number about one comes from ``scalerl_curvefit``, and this package converts its
unit or formats it. ``docs/forecast.md`` explains every number. It contains no command line and prints nothing: what is wrong with a
file is an ``AnalysisProblem``.

Modules are imported on first use: numpy, scipy and matplotlib take most of a second, and a command that shows a table needs none of them.

>>> import pathlib, tempfile
>>> from scalerl_analysis import fit_curve, read_curve
>>> from scalerl_curvefit.simulate import Truth, simulated
>>> curve = simulated(Truth(0.61, 1.92, 2542.0), reach=5.0, n=40, seed=1)
>>> with tempfile.TemporaryDirectory() as folder:
...     path = pathlib.Path(folder, "curve.csv")
...     _ = path.write_text("compute,reward\\n" + "".join(f"{c},{r}\\n" for c, r in zip(curve.compute, curve.reward)))
...     made = fit_curve(read_curve(path))
>>> str(made.state), made.scale.rewards(made.fitted.A)
('OK', '.62 (.60–.64)')
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl_analysis.comparison import Comparison, Recipe, compare, read_recipe
    from scalerl_analysis.costs import Prices
    from scalerl_analysis.curve_columns import Columns
    from scalerl_analysis.curve_file import CurveFile, read_curve
    from scalerl_analysis.fit_text import fit_report
    from scalerl_analysis.fitted_curve import FittedCurve, State, fit_curve
    from scalerl_analysis.history_table import epoch_table
    from scalerl_analysis.label_results import label_table
    from scalerl_analysis.metric_series import MetricSeries
    from scalerl_analysis.pace import Pace, pace_of
    from scalerl_analysis.pictures import draw_comparison, draw_fit, draw_labels, draw_plan, draw_run
    from scalerl_analysis.plans import Plan, plan, plan_json, plan_report
    from scalerl_analysis.prior import Prior, read_prior
    from scalerl_analysis.problem import AnalysisProblem
    from scalerl_analysis.rollout_search import FoundRollouts, RolloutConditions, find_rollouts
    from scalerl_analysis.table import Column, Table
    from scalerl_analysis.task_tables import task_table, turn_table
    from scalerl_analysis.timeline import Timeline

_NAMES = {
    "comparison": ("Comparison", "Recipe", "compare", "read_recipe"),
    "costs": ("Prices",),
    "curve_columns": ("Columns",),
    "curve_file": ("CurveFile", "read_curve"),
    "fit_text": ("fit_report",),
    "fitted_curve": ("FittedCurve", "State", "fit_curve"),
    "history_table": ("epoch_table",),
    "label_results": ("label_table",),
    "metric_series": ("MetricSeries",),
    "pace": ("Pace", "pace_of"),
    "pictures": ("draw_comparison", "draw_fit", "draw_labels", "draw_plan", "draw_run"),
    "plans": ("Plan", "plan", "plan_json", "plan_report"),
    "prior": ("Prior", "read_prior"),
    "problem": ("AnalysisProblem",),
    "rollout_search": ("FoundRollouts", "RolloutConditions", "find_rollouts"),
    "table": ("Column", "Table"),
    "task_tables": ("task_table", "turn_table"),
    "timeline": ("Timeline",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AnalysisProblem",
    "Column",
    "Columns",
    "Comparison",
    "CurveFile",
    "FittedCurve",
    "FoundRollouts",
    "MetricSeries",
    "Pace",
    "Plan",
    "Prices",
    "Prior",
    "Recipe",
    "RolloutConditions",
    "State",
    "Table",
    "Timeline",
    "compare",
    "draw_comparison",
    "draw_fit",
    "draw_labels",
    "draw_plan",
    "draw_run",
    "epoch_table",
    "find_rollouts",
    "fit_curve",
    "fit_report",
    "label_table",
    "pace_of",
    "plan",
    "plan_json",
    "plan_report",
    "read_curve",
    "read_prior",
    "read_recipe",
    "task_table",
    "turn_table",
]


def __getattr__(name: str) -> Any:
    """Import the module of ``name`` on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
