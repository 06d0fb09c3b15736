"""How well forecasts of language models' validation curves do, beside simple baselines.

On 23 real curves from four sources (`curvefit/data/README.md`), from every cut with at least six points at compute > 0
to the points that were measured at 1.5, 2 and 4 times that compute. The baselines' spreads are learned leaving one source
out, and once more leaving out only the curve itself; the better of both counts. At 4× all forecasts are of one source,
so only the latter is left. No forecast is left out of a score; that the guard alarmed, or that the fit was not
identifiable, is a group of its own.

    python benchmarks/forecast_llm.py [--quick] [--jobs 2] [--lcpfn PYTHON [--lcpfn-network FILE]]

LC-PFN (arXiv 2310.20447) is scored where --lcpfn names an interpreter that has it. It needs Python 3.9 or 3.10, since it
wants torch ≤ 1.11, and fetches its network from its authors' server at first use unless a file is given:

    python3.10 -m venv lcpfn && lcpfn/bin/pip install lcpfn==0.1.3
    python benchmarks/forecast_llm.py --lcpfn lcpfn/bin/python
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from support.baselines import (
    GridSearch,
    LevelAndGain,
    asymptotic_power_law,
    drift,
    lcpfn_rows,
    log_linear,
    loss_power_law,
    persistence,
    rows_of,
)
from support.llm_curves import LLMCurve, llm_curves
from support.scoring import MIN_GAIN, Row, Target, pit_histogram, row_of, scores, targets

import scalerl_curvefit as cf

MAIN = 2.0
FACTORS = (MAIN, 1.5, 4.0)
OURS = "this project"
DRIFT = "persistence with drift"
COLUMNS = {
    "n": ("n", "8d"),
    "coverage_90": ("in 90 %", "8.2f"),
    "coverage_50": ("in 50 %", "8.2f"),
    "width": ("width", "8.3f"),
    "median_error": ("|error|", "8.4f"),
    "crps": ("CRPS", "8.4f"),
    "rmse_gain": ("RMSE", "+8.2f"),
    "bias": ("bias", "+8.3f"),
    "brier": ("Brier", "8.3f"),
    "slope": ("slope", "8.2f"),
}
"""Of `Scores`. RMSE: how far below that of persistence. Brier: of P(gain > .02). Slope: of actual on predicted gain."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2× only, a coarser grid for the paper's search")
    parser.add_argument("--jobs", type=int, default=2, help="processes for the fits")
    parser.add_argument("--lcpfn", metavar="PYTHON", help="an interpreter that has lcpfn")
    parser.add_argument("--lcpfn-network", default="EMSIZE512_NLAYERS12_NBUCKETS1000", help="file or name")
    arguments = parser.parse_args()
    curves = llm_curves()
    factors = FACTORS[:1] if arguments.quick else FACTORS
    grid = GridSearch(12 if arguments.quick else 40)
    made = [t for factor in factors for t in targets(curves, factor)]
    heads = {(t.origin.name, t.points): t.head for t in made}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        ours = dict(zip(made, pool.map(forecast_of, made, chunksize=4), strict=True))
        grid.search_all(list(heads.values()), pool)
    baselines: dict[str, LevelAndGain] = {
        "persistence": persistence,
        DRIFT: drift,
        "line in log C": log_linear,
        "power law of 1 − R": loss_power_law,
        "A − D/C^B": asymptotic_power_law,
        "paper's grid search": grid,
    }
    figures: dict[str, float] = {}
    for factor in factors:
        mine = [ours[t] for t in targets(curves, factor)]
        tables = {OURS: [o.row for o in mine]}
        for name, baseline in baselines.items():
            group = by_source if len({o.row.source for o in mine}) > 1 else by_curve
            tables[name] = rows_of(baseline, curves, factor, damped=name == DRIFT, group=group)
        if arguments.lcpfn:
            tables["LC-PFN"] = lcpfn_rows(arguments.lcpfn, arguments.lcpfn_network, curves, factor)
        print(f"\nForecasts at {factor:g}× compute")
        if factor != MAIN:
            table("all", tables)
            continue
        for label, kept in groups(mine).items():
            table(label, {name: [r for r in rows if key(r) in kept] for name, rows in tables.items()})
        print("\nCRPS of baselines, their spread learned on the source's other curves too")
        best = {name: scores(rows).crps for name, rows in tables.items() if name != OURS}
        for name, baseline in baselines.items():
            rows = rows_of(baseline, curves, factor, damped=name == DRIFT, group=by_curve)
            best[name] = min(best[name], scores(rows).crps)
            print(f"  {name:<30} {scores(rows).crps:.4f}")
        figures |= {f"crps: {name}": round(value, 4) for name, value in best.items()}
        held_against(mine, best, figures)
        details(mine, figures)
        alarms(curves, figures)
    if not arguments.lcpfn:
        print("\nLC-PFN is not scored: --lcpfn names an interpreter that has it, see --help")
    print(json.dumps({"benchmark": "forecast_llm", "figures": figures}))


def by_source(curve: LLMCurve) -> str:
    return curve.source


def by_curve(curve: LLMCurve) -> str:
    return curve.name


@dataclass(frozen=True)
class Ours:
    """Our forecast of one target.

    state: OK, INSUFFICIENT where the fit is not identifiable, BROKEN where the guard alarms.
    p_gain: P(gain > .02) of the reward itself, which stops a run; `row` has that of an evaluation over the last one.
    a_low, a_high: 90 % interval of A. reached: mean of the last three rewards.
    """

    row: Row
    state: str
    p_gain: float
    a_low: float
    a_high: float
    reached: float


def forecast_of(target: Target) -> Ours:
    head = target.head
    fitted = cf.fit(head)
    seen = cf.forecast_pool(fitted).evaluation(np.array([target.at]))[:, 0]
    (ahead,) = cf.forecast(fitted, [target.at])
    if not np.allclose(np.quantile(seen, [0.05, 0.95]), [ahead.low, ahead.high]):
        raise RuntimeError("the draws that are scored are not those of forecast(); see forecasting.py")
    row = replace(row_of(target, seen), median=ahead.median)
    broken = cf.detect_collapse(head).broken
    state = "BROKEN" if broken else "OK" if fitted.identifiable else "INSUFFICIENT"
    p_gain = cf.p_gain_above(fitted, target.at, MIN_GAIN)
    return Ours(row, state, p_gain, fitted.A.low, fitted.A.high, float(head.reward[-3:].mean()))


Key = tuple[str, int]


def key(row: Row) -> Key:
    return row.target.origin.name, row.target.points


def groups(mine: Sequence[Ours]) -> dict[str, set[Key]]:
    """Which forecasts belong to each group that has any: all, healthy, by state, by source."""
    every = {key(o.row): o for o in mine}
    made = {
        "all": set(every),
        "healthy: no collapse": {k for k, o in every.items() if not o.row.target.origin.collapsed},
    }
    for k, o in every.items():
        made.setdefault(f"state {o.state}", set()).add(k)
    for k, o in every.items():
        made.setdefault(o.row.source, set()).add(k)
    return made


def table(label: str, tables: dict[str, list[Row]]) -> None:
    print(f"\n  {label:<30} " + " ".join(f"{head:>8}" for head, _ in COLUMNS.values()))
    for name, rows in tables.items():
        got = scores(rows)
        cells = " ".join(f"{getattr(got, c):{form}}" for c, (_, form) in COLUMNS.items())
        print(f"  {name:<30} {cells}", flush=True)


def held_against(mine: Sequence[Ours], baselines: dict[str, float], figures: dict[str, float]) -> None:
    """Our figures beside what they must reach. baselines: the lower CRPS of each."""
    print(f"\n{'at 2×':<66} ours   must be")

    def check(name: str, value: float, target: str, what: str) -> None:
        figures[name] = round(value, 4)
        print(f"  {what:<62} {value:8.4f}   {target}")

    got = scores(o.row for o in mine)
    healthy = scores([o.row for o in mine if not o.row.target.origin.collapsed])
    baseline = min(baselines, key=baselines.__getitem__)
    check("coverage_90", got.coverage_90, ".88–.95", "inside the 90 % interval")
    check("coverage_50", got.coverage_50, ".45–.60", "inside the 50 % interval")
    check("width", got.width, "≤ .12", "median width of the 90 % interval")
    check("median_error", got.median_error, "≤ .016", "median error")
    check("crps", got.crps, "≤ .016", "CRPS")
    check(
        "crps_below_best_rival",
        1 - got.crps / baselines[baseline],
        "≥ .15",
        f"CRPS below the best baseline's ({baseline})",
    )
    check("rmse_gain_healthy", healthy.rmse_gain, "≥ .40", "RMSE below persistence's, healthy")
    check("rmse_gain", got.rmse_gain, "≥ .30", "RMSE below persistence's, all")
    check("brier", got.brier, "≤ .20", f"Brier, gain in the evaluation; base rate {got.base_brier:.3f}")
    stops = float(np.mean([(o.p_gain - o.row.gained) ** 2 for o in mine]))
    check("brier_stop", stops, "≤ .20", "Brier of the probability that stops")


def details(mine: Sequence[Ours], figures: dict[str, float]) -> None:
    """Where in our distributions the rewards fell, what P(gain) came to, and A beside what was reached."""
    bins = pit_histogram(o.row for o in mine)
    print("\nPIT, tenths: " + " ".join(f"{b:.2f}" for b in bins) + "   (even: .10 each)")
    print(f"P(gain > {MIN_GAIN})      forecasts   gained that much")
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.7), (0.7, 0.9), (0.9, 1.001)):
        inside = [o.row.gained for o in mine if low <= o.p_gain < high]
        print(f"  {low:.1f}–{min(high, 1):.1f} {len(inside):16d}   {sum(inside):5d}")
    for label, some in (("all", list(mine)), ("OK", [o for o in mine if o.state == "OK"])):
        if not some:
            continue
        for edge in ("low", "high"):
            below = float(np.mean([getattr(o, f"a_{edge}") < o.reached for o in some]))
            figures[f"a_{edge}_below_reached_{label.lower()}"] = round(below, 4)
            print(
                f"{edge} end of A's interval below the reward reached, {label} (n={len(some)}): {below:.2f}"
            )


def alarms(curves: Sequence[LLMCurve], figures: dict[str, float]) -> None:
    """Runs on which the guard alarms after any of their evaluations."""
    alarmed = {
        c: any(cf.detect_collapse(c.curve.head(n)).broken for n in range(1, len(c.curve) + 1)) for c in curves
    }
    for label, kept in (("collapsed", True), ("healthy", False)):
        some = [alarm for c, alarm in alarmed.items() if c.collapsed is kept]
        figures[f"alarms_{label}"] = sum(some)
        print(f"the guard alarms on {sum(some)} of {len(some)} {label} runs")


if __name__ == "__main__":
    main()
