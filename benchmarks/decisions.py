"""What the autoscaler's decisions cost and save, over simulated runs whose truth is known.

Every run is driven through the operator's own ``decide`` evaluation by evaluation, with the operator's own question
and the sidecar's own answer (in this process, without HTTP), as ``mode: Advisory`` would: a stop ends nothing here,
so that what the policy would have said afterwards is seen too.

Runs: the ten published parameter sets (``curvefit/data/published_params.json``) × evaluation noise of sd .005, .0075
or .01 × autocorrelation 0, .3, .5 or .7 × planned compute of 2, 4, 8 or 16 midpoints, 40 evaluations each, on a
sigmoid or on what is not one: a stretched exponential, a power law, a second rise at six midpoints. For half of them
an evaluation has as many samples as explain its noise, for the other half the paper's 16,000, which do not. A fifth of the
runs breaks: between evaluations 16 and 30 the curve begins to lose a third to all of its gain, within 3 to 9
evaluations, and does not come back.

Terms
- true gain: R(horizon·C) − R(C) on the noiseless curve, C the compute at an evaluation; horizon 2, minGain .02.
- stop: the first evaluation with state STOP. False stop: the true gain there was ≥ minGain. A run that breaks is
  judged by the curve it was on until it broke; stopped later, its stop is not false.
- over: the true gain is under minGain at the last half of the planned evaluations or more of them. Those are the runs
  that a stop saves something on. `ends_under` are all whose true gain is under minGain at the last evaluation, also if
  by a hair or since just then; the table by how long tells how many evaluations a stop takes.
- saved: 1 − evaluations used ÷ planned, of the runs that are over; 0 for one that was not stopped.
- recall: broken runs with state BROKEN at an evaluation after the fall began. False alarm: a healthy run with state
  BROKEN at any evaluation.
- hold: a broken run that `mode: Auto` suspends, once ``stopAfter`` evaluations in a row found it so. False hold: of a
  healthy run; each of those goes through once more with somebody who lets it go on at once, and the most holds that
  takes are counted.
- reversal: a STOP or a BROKEN that is taken back (the state leaves it again).

    OMP_NUM_THREADS=1 python benchmarks/decisions.py [--quick] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_curvefit import CurveError, Family
from scalerl_curvefit.families import gain_share
from scalerl_curvefit.sidecar.answers import answer_forecast, error_code
from scalerl_curvefit.simulate import Truth, ar1_noise
from scalerl_operator.autoscaling.observation import Point, point_set
from scalerl_operator.autoscaling.question import question
from scalerl_operator.policy.autoscale import decide
from scalerl_operator.policy.facts import (
    RECENT,
    Generators,
    History,
    Latest,
    Limits,
    Observation,
    Progress,
    Recipe,
    Spent,
    Staleness,
    State,
)

DATA = Path(__file__).parents[1] / "curvefit" / "data" / "published_params.json"
ROWS = [Truth(A=a, B=b, Cmid=cmid) for cmid, b, a in json.loads(DATA.read_text())["rows"].values()]
SIGMAS, RHOS, SPANS = (0.005, 0.0075, 0.01), (0.0, 0.3, 0.5, 0.7), (2.0, 4.0, 8.0, 16.0)
HEALTHY = ("sigmoid", "stretched", "power law", "second rise")
KINDS = (*HEALTHY, "broken")
EVALUATIONS = 40
MANY_SAMPLES = 16_000
DEVICES = 80
TOKENS_PER_DEVICE_HOUR = 1_000_000
SPEC = AutoscalingSpec(mode="Advisory")
MIN_GAIN, HORIZON = float(SPEC.min_gain), float(SPEC.horizon)
RUNS, QUICK_RUNS = 650, 100

Reward = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Result:
    kind: str
    sigma: float
    rho: float
    samples: str
    states: tuple[State, ...]
    true_gain: tuple[float, ...]
    broke_at: int | None
    held: tuple[int, ...]
    """Numbers of evaluations after which it was held."""
    held_again: int
    """How often a healthy run is held where somebody lets it go on each time."""

    @property
    def stopped(self) -> int | None:
        """Number of evaluations used until the first stop."""
        return next((n for n, state in enumerate(self.states, 1) if state is State.STOP), None)

    @property
    def false_stop(self) -> bool:
        if self.stopped is None or (self.broke_at is not None and self.stopped > self.broke_at):
            return False
        return self.true_gain[self.stopped - 1] >= MIN_GAIN

    @property
    def over_from(self) -> int:
        """Evaluations used when the true gain fell under minGain for good; EVALUATIONS + 1 if it never did."""
        under = 0
        while under < EVALUATIONS and self.true_gain[EVALUATIONS - 1 - under] < MIN_GAIN:
            under += 1
        return EVALUATIONS + 1 - under

    @property
    def saved(self) -> float:
        return 0.0 if self.stopped is None else 1.0 - self.stopped / EVALUATIONS

    @property
    def reversals(self) -> int:
        pairs = zip(self.states, self.states[1:], strict=False)
        return sum(a in (State.STOP, State.BROKEN) and b is not a for a, b in pairs)


def one_run(job: int) -> Result:
    """One run from its first evaluation to its last."""
    random = np.random.default_rng(job)
    kind, truth = KINDS[job % len(KINDS)], ROWS[job // len(KINDS) % len(ROWS)]
    sigma, rho = float(random.choice(SIGMAS)), float(random.choice(RHOS))
    samples = MANY_SAMPLES if random.random() < 0.5 else round(0.25 / sigma**2)
    compute = np.linspace(1 / EVALUATIONS, 1, EVALUATIONS) * float(random.choice(SPANS)) * truth.Cmid
    reward = shape(kind, truth)
    seen, broke_at = reward(compute), None
    if kind == "broken":
        broke_at = int(random.integers(16, 31))
        share = random.uniform(1 / 3, 1) * np.clip((np.arange(1, 41) - broke_at) / random.uniform(3, 9), 0, 1)
        seen = seen - share * (seen - truth.R0)
    seen = np.clip(seen + ar1_noise(EVALUATIONS, sigma, rho, random), 0, 1)
    gain = reward(HORIZON * compute) - reward(compute)
    states, held = driven(compute, seen, samples)
    again = len(driven(compute, seen, samples, lenient=True)[1]) if held and kind != "broken" else len(held)
    kept = "16,000" if samples == MANY_SAMPLES else "explain σ"
    return Result(kind, sigma, rho, kept, tuple(states), tuple(gain.tolist()), broke_at, tuple(held), again)


def shape(kind: str, truth: Truth) -> Reward:
    """The noiseless curve of a kind of run."""
    family = {"stretched": Family.STRETCHED, "power law": Family.POWER_LAW}.get(kind, Family.SIGMOID)
    exponent = truth.B * (0.6 if kind == "stretched" else 1.0)

    def reward(compute: np.ndarray) -> np.ndarray:
        share = gain_share(family, np.log(compute), np.log(truth.Cmid), np.log(exponent))
        rise = 0.12 / (1 + (6 * truth.Cmid / compute) ** 4) if kind == "second rise" else 0.0
        return np.asarray(truth.R0 + (truth.A - truth.R0) * share + rise)

    return reward


def driven(
    compute_device_hours: np.ndarray, rewards: np.ndarray, samples: int, *, lenient: bool = False
) -> tuple[list[State], list[int]]:
    """The states that the operator's policy goes through, and after which evaluations it would have held the run.

    lenient: somebody lets a run that is held go on at once.
    """
    points: list[Point] = []
    history, states = History(), []
    held: list[int] = []
    for version, (hours, reward) in enumerate(
        zip(compute_device_hours.tolist(), rewards.tolist(), strict=True), 1
    ):
        points.append(
            Point(
                version=100 * version,
                tokens=round(hours * TOKENS_PER_DEVICE_HOUR),
                reward=reward,
                samples=samples,
                eval_version="held-out",
                mixed=False,
                truncated=0.02,
                seconds=3600.0 * hours / DEVICES,
                device_seconds=3600.0 * hours,
            )
        )
        look = observed(points, history, compute_device_hours[-1])
        decision = decide(SPEC, look, history)
        if decision.action.kind == "hold":
            held.append(version)
            if lenient:
                decision = decide(SPEC, replace(look, resumed=True), decision.history)
        history = decision.history
        states.append(decision.state)
    return states, held


def observed(points: list[Point], history: History, budget_device_hours: float) -> Observation:
    """What the policy sees after the last of these points, the forecast included."""
    last = points[-1]
    seen = Observation(
        unix_seconds=1.7e9 + last.seconds,
        spent=Spent(seconds=last.seconds, device_seconds=last.device_seconds, steps=last.version),
        limits=Limits(device_hours=float(budget_device_hours)),
        recent=[
            Progress(version=p.version, tokens=p.tokens, seconds=p.seconds, device_seconds=p.device_seconds)
            for p in points[-RECENT:]
        ],
        latest=Latest(version=last.version, reward=last.reward, truncated=last.truncated),
        points=point_set(points),
        generators=Generators(wanted=8, ready=8, devices_each=8),
        staleness=Staleness(allowed=8, most=4),
        recipe=Recipe(batch_completions=768, context_tokens=16_384, fp32_head=True, loss="CISPO"),
    )
    asked = question(SPEC, points, seen, history)
    assert isinstance(asked, ForecastRequest)
    answer, trouble = answered(asked)
    return replace(seen, forecast=answer, trouble=trouble)


def answered(request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
    try:
        return answer_forecast(request), ""
    except CurveError as error:
        return None, f"refused: {error_code(error)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs, a minute")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    started = time.perf_counter()
    runs = QUICK_RUNS if arguments.quick else RUNS
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(one_run, range(runs), chunksize=2))
    figures = report(results)
    print(f"{runs} runs of {EVALUATIONS} evaluations in {time.perf_counter() - started:.0f} s")
    print(json.dumps({"benchmark": "decisions", "figures": figures}))


def report(results: list[Result]) -> dict[str, float]:
    """Print the table; the figures by name."""
    figures: dict[str, float] = {}

    def check(name: str, value: float, target: str, what: str) -> None:
        figures[name] = round(float(value), 4)
        print(f"  {what:<74} {value:7.3f}   {target}")

    healthy = [r for r in results if r.kind != "broken"]
    broken = [r for r in results if r.kind == "broken"]
    over = [r for r in healthy if EVALUATIONS + 1 - r.over_from >= EVALUATIONS // 2]
    ends_under = [r for r in healthy if r.over_from <= EVALUATIONS]
    print(f"  {'decisions':<74}    ours   must be")
    check(
        "false_stops",
        mean(r.false_stop for r in results),
        "≤ .02",
        f"false stops, of all runs (n={len(results)})",
    )
    check(
        "over_stopped",
        mean(r.stopped is not None for r in over),
        "≥ .80",
        f"stopped, of runs that are over (n={len(over)})",
    )
    check("over_saved", mean(r.saved for r in over), "–", "of their planned evaluations saved, mean")
    check(
        "ends_under_stopped",
        mean(r.stopped is not None for r in ends_under),
        "–",
        f"stopped, of all that end under minGain (n={len(ends_under)})",
    )
    found = [State.BROKEN in r.states[r.broke_at or 0 :] for r in broken]
    check("broken_recall", mean(found), "≥ .75", f"broken runs found (n={len(broken)})")
    check(
        "false_alarms",
        mean(State.BROKEN in r.states for r in healthy),
        "≤ .10",
        f"healthy runs with an alarm (n={len(healthy)})",
    )
    held = [any(n > (r.broke_at or 0) for n in r.held) for r in broken]
    check("held", mean(held), "–", "broken runs held")
    after = [
        next(n for n in r.held if n > (r.broke_at or 0)) - (r.broke_at or 0) for r in broken if any(r.held)
    ]
    check("held_after", float(np.median(after)), "–", "evaluations after the fall began, median")
    check("false_holds", mean(bool(r.held) for r in healthy), "≤ .10", "healthy runs held")
    again = max((r.held_again for r in healthy), default=0)
    check("held_again", again, "–", "holds of one healthy run that is let go on each time, most")
    reversals = np.array([r.reversals for r in results])
    check(
        "reversals_p99",
        float(np.quantile(reversals, 0.99, method="higher")),
        "≤ 1",
        f"reversals a run, 99th percentile (most: {reversals.max()})",
    )
    for least, most in ((1, 5), (5, 10), (10, 20), (20, 41)):
        some = [r for r in healthy if least <= EVALUATIONS + 1 - r.over_from < most]
        how = mean(r.stopped is not None for r in some)
        print(
            f"    under minGain for {least:2d} to {most - 1:2d} evaluations: n={len(some):3d}, stopped {how:.2f}"
        )
    for title, key in (("kind", lambda r: r.kind), ("σ", lambda r: r.sigma), ("ρ", lambda r: r.rho)):
        for value in sorted({key(r) for r in results}):
            some = [r for r in results if key(r) == value]
            some_over = [r for r in over if key(r) == value]
            print(
                f"    {title} {value!s:<12} n={len(some):3d}  stopped {mean(r.stopped is not None for r in some):.2f}, "
                f"false {mean(r.false_stop for r in some):.3f}; over n={len(some_over):3d}, stopped "
                f"{mean(r.stopped is not None for r in some_over):.2f}; alarms {mean(State.BROKEN in r.states for r in some):.2f}; "
                f"reversals {mean(r.reversals for r in some):.2f}"
            )
    return figures


def mean(values) -> float:
    kept = [float(v) for v in values]
    return sum(kept) / len(kept) if kept else float("nan")


if __name__ == "__main__":
    main()
