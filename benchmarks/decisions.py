"""What the autoscaler's decisions cost and save, over simulated runs whose truth is known and over real curves.

Every run is driven through the operator's own ``decide`` evaluation by evaluation, with the operator's own question
and the sidecar's own answer (in this process, without HTTP), as ``mode: Advisory`` would: a stop ends nothing here,
so that what the policy would have said afterwards is seen too.

Simulated runs: the 28 families of ``run_families.py``, 40 evaluations each over the planned compute, with noise of sd
.004 to .012 and autocorrelation 0 to .6. The samples of an evaluation explain its noise, or are too many (16,000:
noise beyond the binomial), or too few (evaluations on the same prompts are paired: noise .43 to .65 of the binomial).
Real curves: those of ``curvefit/data``, each ending where its record ends, those of games with the late rises of games; their
truth is the mean of three evaluations. --families real drives only them.

Terms
- gain to come: the highest noiseless reward up to twice the compute or the end of the plan, whichever is later, above
  the reward now; late rises count.
- stop: the first evaluation with state STOP. False stop: the gain to come was ≥ minGain (.04). A run that falls is judged
  by its curve before the fall; a stop after it is not false.
- over: the gain to come is under minGain at the last half of the planned evaluations or more, and nothing falls.
  saved: 1 − evaluations used ÷ planned of those; 0 for one that was not stopped.
- fallen: the noiseless mean of three evaluations lies .01 or more below the best such mean before it. Found: a run
  that falls with state BROKEN at or after the fall. False alarm, false hold: one at an evaluation where the run has not
  fallen, of runs of any family; an alarm at the best reward so far is counted apart.
- reversal: a STOP or a BROKEN that is taken back (the state leaves it again), unless the run has really fallen since, or
  has really come back.
- Brier: mean of (P(gain > minGain) − whether it came)², at every fourth evaluation with a forecast.

With --families others the runs are of the 35 families of ``other_families.py``, which bounds and patience were not chosen
on; with tried and kept, of 20 each of ``more_families.py``: thresholds are to be chosen with the tried ones only.

With --earlier N each simulated run has N finished runs of its family as a prior: the same curve with its speed changed by
a factor of sd .1 and its gains by one of sd .05, and noise of their own.

    OMP_NUM_THREADS=1 python benchmarks/decisions.py [--families others | --earlier 5] [--quick] [--each 20] [--only NAME] [--frontier] [--jobs 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from more_families import KEPT, TRIED
from msgspec.structs import replace
from other_families import OTHERS, Families, seen_run
from other_families import Shape as OtherShape
from run_families import FAMILIES, Shape

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import EarlierRun, ForecastAnswer, ForecastRequest, Points
from scalerl_autoscaling import vote
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.forecast_request import build_request
from scalerl_autoscaling.models import (
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
from scalerl_autoscaling.observation import Point, point_set
from scalerl_curvefit import CurveError
from scalerl_curvefit.sidecar.forecast_answers import answer_forecast, error_code
from scalerl_curvefit.simulate import ar1_noise

DATA = Path(__file__).parents[1] / "curvefit" / "data"
SIGMAS, RHOS = (0.004, 0.0075, 0.012), (0.0, 0.3, 0.6)
SAMPLES = ("explain the noise", "too many", "paired")
EVALUATIONS = 40
MANY_SAMPLES = 16_000
DEVICES = 80
PLAN_DEVICE_HOURS = 4000.0
TOKENS_PER_DEVICE_HOUR = 1_000_000
SPEC = AutoscalingSpec(mode="Advisory")
GAMES = AutoscalingSpec(mode="Advisory", late_rises="Games")
MIN_GAIN = float(SPEC.min_gain)
FALLEN = 0.25 * MIN_GAIN
EACH, QUICK_EACH = 20, 3
PATIENCES = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 2.0)
LATEST = 0.7
"""Share of the plan until when a run that learns nothing is to be stopped."""


@dataclass(frozen=True)
class Result:
    """One run. to_come, fallen: the truth at each evaluation. p: P(gain > minGain), None without a forecast."""

    name: str
    kind: str
    seen: tuple[float, ...]
    to_come: tuple[float, ...]
    fallen: tuple[bool, ...]
    falls_at: int | None
    states: tuple[State, ...]
    p: tuple[float | None, ...]
    held: tuple[int, ...]
    frontier: tuple[int | None, ...] = ()
    """Evaluations used until the first stop, at each of PATIENCES."""

    @property
    def stopped(self) -> int | None:
        """Number of evaluations used until the first stop."""
        return next((n for n, state in enumerate(self.states, 1) if state is State.STOP), None)

    @property
    def false_stop(self) -> bool:
        if self.stopped is None or (self.falls_at is not None and self.stopped > self.falls_at):
            return False
        return self.to_come[self.stopped - 1] >= MIN_GAIN

    @property
    def lost(self) -> float:
        """Reward that a stop gave away."""
        return 0.0 if self.stopped is None or not self.false_stop else self.to_come[self.stopped - 1]

    @property
    def over(self) -> bool:
        return self.falls_at is None and max(self.to_come[len(self.seen) // 2 :]) < MIN_GAIN

    @property
    def saved(self) -> float:
        return 0.0 if self.stopped is None else 1.0 - self.stopped / len(self.seen)

    @property
    def found(self) -> bool:
        return State.BROKEN in self.states[self.falls_at or 0 :]

    @property
    def false_alarm(self) -> bool:
        return any(s is State.BROKEN and not f for s, f in zip(self.states, self.fallen, strict=True))

    @property
    def false_hold(self) -> bool:
        return any(not self.fallen[n - 1] for n in self.held)

    @property
    def alarms_at_best(self) -> int:
        """Truncation alarms apart, which have nothing to do with the reward."""
        best = np.maximum.accumulate(self.seen) <= np.array(self.seen)
        alarms = (s is State.BROKEN and bool(b) for s, b in zip(self.states, best, strict=True))
        return 0 if self.name == "truncation" else sum(alarms)

    @property
    def reversals(self) -> int:
        count, truly = 0, False
        for n, (a, b) in enumerate(pairwise(self.states), 1):
            truly = self.fallen[n - 1] or (truly and a is State.BROKEN)
            if a is State.STOP and b is not a:
                count += not (b is State.BROKEN and self.fallen[n])
            elif a is State.BROKEN and b is not a:
                count += not truly or self.fallen[min(n + 3, len(self.fallen) - 1)]
        return count


def one_run(job: int, only: str = "", earlier: int = 0) -> Result:
    """One run from its first evaluation to its last."""
    names = [only] if only else list(FAMILIES)
    name = names[job % len(names)]
    random = np.random.default_rng([job // len(names), list(FAMILIES).index(name)])
    kind, draw = FAMILIES[name]
    shape = draw(random)
    sigma, rho = float(random.choice(SIGMAS)), float(random.choice(RHOS))
    u = np.arange(1, EVALUATIONS + 1) / EVALUATIONS
    clean = np.clip(shape.trend(u) + shape.wave(u), 0, 1)
    samples = _samples(str(random.choice(SAMPLES)), clean, sigma, random)
    noise = ar1_noise(EVALUATIONS, sigma, rho, random) + ar1_noise(EVALUATIONS, shape.drift, 0.95, random)
    seen = random.binomial(samples, clean) / samples if shape.zeros else np.clip(clean + noise, 0, 1)
    truncated = None if shape.truncated is None else shape.truncated(u)
    falls_at = None if shape.falls_at is None else round(shape.falls_at * EVALUATIONS)
    down = np.array(fallen(clean)) | (False if truncated is None else truncated >= 0.1)
    runs = [_earlier_run(shape, u, sigma, rho, str(i), random) for i in range(earlier)]
    return _result(
        name, kind, seen, samples, to_come(shape, u), down.tolist(), falls_at, truncated, earlier=runs
    )


SETS: dict[str, Families] = {"others": OTHERS, "tried": TRIED, "kept": KEPT}


def other_run(job: int, families: str = "others") -> Result:
    """One run of another family, of draws that nothing was chosen on."""
    of = SETS[families]
    seen = seen_run(list(of)[job % len(of)], job // len(of), seed=2, families=of)
    shape = seen.shape
    truncated = None if shape.truncated is None else np.clip(shape.truncated(seen.u), 0, 1)
    return _result(
        seen.name,
        seen.kind,
        seen.rewards,
        seen.samples,
        to_come(shape, seen.u),
        (np.array(fallen(seen.clean)) | (False if truncated is None else truncated >= 0.1)).tolist(),
        None if shape.falls_at is None else round(shape.falls_at * len(seen.u)),
        truncated,
        seen.u,
    )


def _earlier_run(
    shape: Shape, u: np.ndarray, sigma: float, rho: float, name: str, random: np.random.Generator
) -> EarlierRun:
    """A finished run like one of this shape."""
    speed, gains = np.exp(0.1 * random.standard_normal()), 1.0 + 0.05 * random.standard_normal()
    curve = shape.trend(u * speed) + shape.wave(u * speed)
    curve = curve[0] + (curve - curve[0]) * gains + ar1_noise(len(u), sigma, rho, random)
    compute = u * PLAN_DEVICE_HOURS * TOKENS_PER_DEVICE_HOUR
    return EarlierRun(
        name=name, points=Points(compute=compute.tolist(), reward=np.clip(curve, 0, 1).tolist())
    )


def _samples(how: str, clean: np.ndarray, sigma: float, random: np.random.Generator) -> int:
    rate = float(np.clip(clean.mean(), 0.05, 0.95))
    explain = rate * (1 - rate) / sigma**2
    return {
        "explain the noise": round(explain),
        "too many": MANY_SAMPLES,
        "paired": round(explain * random.uniform(0.43, 0.65) ** 2),
    }[how]


def to_come(shape: Shape | OtherShape, u: np.ndarray) -> list[float]:
    """Gain to come at each u."""
    ahead = [np.linspace(now, max(2 * now, 1.0), 200) for now in u]
    before = 1.0 if shape.falls_at is None else shape.falls_at
    # What a run that falls had been going to gain is not known; nothing is, once it fell.
    gains = [float(shape.trend(a[a <= max(before, a[0]) + (shape.falls_at is None)]).max()) for a in ahead]
    return [high - float(shape.trend(np.array([now]))[0]) for high, now in zip(gains, u, strict=True)]


def fallen(clean: Sequence[float]) -> list[bool]:
    """Whether the run lies below its best at each evaluation, by means of three."""
    means = [float(np.mean(clean[max(0, n - 3) : n])) for n in range(1, len(clean) + 1)]
    return [max(means[: n + 1]) - means[n] >= FALLEN for n in range(len(means))]


def real_runs() -> list[Result]:
    """The public curves, through the same policy; a curve's record is its plan."""
    results = []
    for name, kind, compute, reward, samples in real_curves():
        means = [float(np.mean(reward[max(0, n - 3) : n])) for n in range(1, len(reward) + 1)]
        gains = [max(means[n:]) - means[n] for n in range(len(means))]
        spec = GAMES if kind == "Procgen" else SPEC
        results.append(
            _result(
                name, kind, np.array(reward), samples, gains, fallen(reward), None, None, compute, spec=spec
            )
        )
    return results


def real() -> None:
    """Print a line for each kind of real curves."""
    print("\nreal curves, each as far as its record goes")
    runs = real_runs()
    families(runs, lambda r: r.kind)
    for run in runs:
        if run.false_stop:
            print(f"    {run.name}: stopped after {run.stopped} of {len(run.seen)}, {run.lost:.3f} lost")
    print(
        json.dumps({"benchmark": "decisions", "figures": {"lost_real": round(mean(r.lost for r in runs), 4)}})
    )


def real_curves() -> Iterable[tuple[str, str, list[float], list[float], int]]:
    for file, kind in (("llm_curves", "language model"), ("procgen_curves", "Procgen")):
        for name, curve in json.loads((DATA / f"{file}.json").read_text())["curves"].items():
            points = [(c, r) for c, r in zip(curve["compute"], curve["reward"], strict=True) if c > 0]
            yield name, kind, [c for c, _ in points], [r for _, r in points], curve.get("samples") or 1000


def _result(
    name: str,
    kind: str,
    seen: np.ndarray,
    samples: int,
    gains: Sequence[float],
    down: Sequence[bool],
    falls_at: int | None,
    truncated: np.ndarray | None,
    compute: Sequence[float] | None = None,
    earlier: Sequence[EarlierRun] = (),
    spec: AutoscalingSpec = SPEC,
) -> Result:
    share = np.arange(1, len(seen) + 1) / len(seen) if compute is None else np.array(compute) / compute[-1]
    states, held, looks = driven(share * PLAN_DEVICE_HOURS, seen, samples, truncated, earlier, spec)
    outlooks = [None if look.forecast is None else look.forecast.outlook for look in looks]
    return Result(
        name,
        kind,
        tuple(map(float, seen)),
        tuple(gains),
        tuple(down),
        falls_at,
        tuple(states),
        tuple(None if outlook is None else outlook.p_gain_above_min for outlook in outlooks),
        tuple(held),
        tuple(stopped_with(patience, looks, spec) for patience in PATIENCES),
    )


def stopped_with(patience: float, looks: Sequence[Observation], spec: AutoscalingSpec) -> int | None:
    """Evaluations used until the first stop, had a run that shows nothing been given so much of its plan."""
    history, kept = History(), vote.PATIENCE
    vote.PATIENCE = patience
    try:
        for used, look in enumerate(looks, 1):
            decision = decide(spec, look, history)
            if decision.state is State.STOP:
                return used
            history = decision.history
        return None
    finally:
        vote.PATIENCE = kept


def driven(
    compute_device_hours: np.ndarray,
    rewards: np.ndarray,
    samples: int,
    truncated: np.ndarray | None,
    earlier: Sequence[EarlierRun] = (),
    spec: AutoscalingSpec = SPEC,
) -> tuple[list[State], list[int], list[Observation]]:
    """The states that the operator's policy goes through, after which evaluations it would have held the run, what it saw."""
    points: list[Point] = []
    history, states = History(), []
    held: list[int] = []
    looks: list[Observation] = []
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
                truncated=0.02 if truncated is None else float(truncated[version - 1]),
                seconds=3600.0 * hours / DEVICES,
                device_seconds=3600.0 * hours,
            )
        )
        look = observed(points, history, compute_device_hours[-1], earlier, spec)
        decision = decide(spec, look, history)
        if decision.action.kind == "hold":
            held.append(version)
        history = decision.history
        states.append(decision.state)
        looks.append(look)
    return states, held, looks


def observed(
    points: list[Point],
    history: History,
    budget_device_hours: float,
    earlier: Sequence[EarlierRun],
    spec: AutoscalingSpec,
) -> Observation:
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
        recipe=Recipe(batch_completions=768, context_tokens=16_384, fp32_head=True, loss="cispo"),
    )
    asked = build_request(spec, points, seen, history)
    assert isinstance(asked, ForecastRequest)
    answer, trouble = answered(replace(asked, earlier=list(earlier)))
    return replace(seen, forecast=answer, trouble=trouble)


def answered(request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
    try:
        return answer_forecast(request), ""
    except CurveError as error:
        return None, f"the forecast was refused: {error_code(error)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EACH} runs a family, a minute")
    parser.add_argument("--each", type=int, default=EACH, help="runs of each family")
    parser.add_argument("--only", default="", choices=["", *FAMILIES], help="one family")
    parser.add_argument(
        "--frontier", action="store_true", help="stops by the patience with runs that show nothing"
    )
    parser.add_argument(
        "--families",
        default="",
        choices=["", "real", *SETS],
        help="those of other_families.py; or, of more_families.py, those that thresholds may be chosen with, or those kept apart",
    )
    parser.add_argument("--earlier", type=int, default=0, help="finished runs of its family for each run")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    if arguments.families == "real":
        real()
        return
    started = time.perf_counter()
    each = QUICK_EACH if arguments.quick else arguments.each
    runs = each * (1 if arguments.only else len(SETS[arguments.families] if arguments.families else FAMILIES))
    run = partial(one_run, only=arguments.only, earlier=arguments.earlier)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        other = partial(other_run, families=arguments.families)
        results = list(pool.map(other if arguments.families else run, range(runs), chunksize=2))
    figures = report(results)
    if arguments.frontier:
        frontier(results)
    if not (arguments.only or arguments.quick or arguments.earlier or arguments.families):
        real()
    print(f"{runs} runs in {time.perf_counter() - started:.0f} s")
    print(json.dumps({"benchmark": "decisions", "figures": figures}))


def report(results: list[Result]) -> dict[str, float]:
    """Print the table; the figures by name."""
    figures: dict[str, float] = {}

    def check(name: str, value: float, target: str, what: str) -> None:
        figures[name] = round(float(value), 4)
        print(f"  {what:<74} {value:7.3f}   {target}")

    over = [r for r in results if r.over]
    nothing = [r for r in results if r.kind == "nothing"]
    smooth = [r for r in results if r.kind == "smooth"]
    falls = [r for r in results if r.kind == "falls"]
    in_time = [r.stopped is not None and r.stopped <= LATEST * len(r.seen) for r in nothing]
    chances = [
        (p, float(gain >= MIN_GAIN))
        for r in results
        for p, gain in list(zip(r.p, r.to_come, strict=True))[9::4]
        if p is not None and r.falls_at is None
    ]
    base = mean(came for _, came in chances)
    print(f"  {'decisions':<74}    ours   must be")
    check(
        "false_stops", mean(r.false_stop for r in results), "≤ .04", f"false stops, of all (n={len(results)})"
    )
    check("false_stops_smooth", mean(r.false_stop for r in smooth), "0", f"of smooth ones (n={len(smooth)})")
    check("lost", mean(r.lost for r in results), "–", "reward lost to false stops, mean over all runs")
    check(
        "over_stopped",
        mean(r.stopped is not None for r in over),
        "≥ .65",
        f"stopped, of runs that are over (n={len(over)})",
    )
    check("over_saved", mean(r.saved for r in over), "≥ .30", "of their compute saved, mean")
    check(
        "nothing_stopped",
        mean(in_time),
        "≥ .80",
        f"stopped by .7 of the plan, of those that learn ≤ .06 (n={len(nothing)})",
    )
    check("broken_recall", mean(r.found for r in falls), "≥ .89", f"runs that fall, found (n={len(falls)})")
    check(
        "false_alarms",
        mean(r.false_alarm for r in results),
        "≤ .05",
        "runs with an alarm where nothing had fallen",
    )
    check("false_holds", mean(r.false_hold for r in results), "≤ .03", "runs held where nothing had fallen")
    check("alarms_at_best", sum(r.alarms_at_best for r in results), "0", "alarms at the best reward so far")
    reversals = np.array([r.reversals for r in results])
    p99 = float(np.quantile(reversals, 0.99, method="higher"))
    check("reversals_p99", p99, "≤ 1", f"reversals a run, 99th percentile (most: {reversals.max()})")
    brier = mean((p - came) ** 2 for p, came in chances)
    check(
        "brier",
        brier,
        "≤ .20",
        f"Brier of P(gain > minGain), n={len(chances)} (the base rate alone: {base * (1 - base):.3f})",
    )
    edges = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.001)
    for low, high in pairwise(edges):
        some = [came for p, came in chances if low <= p < high]
        print(f"    P {low:.2f} to {min(high, 1):.2f}: came in {mean(some):.2f} of {len(some)}")
    families(results, lambda r: r.name)
    return figures


def frontier(results: list[Result]) -> None:
    """Reward lost against compute saved over settings of the patience."""
    over, nothing = [r for r in results if r.over], [r for r in results if r.kind == "nothing"]
    print(
        "\n  patience  false stops  smooth  reward lost  over: stopped  saved  nothing: stopped by .7  saved"
    )
    for i, patience in enumerate(PATIENCES):

        def at(r: Result, i: int = i) -> Result:
            states = (State.STOP if n == r.frontier[i] else State.CONTINUE for n in range(1, len(r.seen) + 1))
            return dataclasses.replace(r, states=tuple(states))

        every, o, n = [at(r) for r in results], [at(r) for r in over], [at(r) for r in nothing]
        in_time = mean(r.stopped is not None and r.stopped <= LATEST * len(r.seen) for r in n)
        print(
            f"  {'never' if patience > 1 else f'{patience:.2f}':<8}  {mean(r.false_stop for r in every):11.3f}"
            f"  {sum(r.false_stop for r in every if r.kind == 'smooth'):6d}  {mean(r.lost for r in every):11.4f}"
            f"  {mean(r.stopped is not None for r in o):13.2f}  {mean(r.saved for r in o):5.2f}"
            f"  {in_time:22.2f}  {mean(r.saved for r in n):5.2f}"
        )


def families(results: list[Result], key: Callable[[Result], str]) -> None:
    """A line for each group of runs."""
    for value in dict.fromkeys(key(r) for r in results):
        some = [r for r in results if key(r) == value]
        over = [r for r in some if r.over]
        stops = [r.stopped / len(r.seen) for r in some if r.stopped]
        at = f"at {np.median(stops):.2f}" if stops else "never"
        print(
            f"    {value:<22} n={len(some):3d}  stopped {len(stops):3d} {at:<7}  false {sum(r.false_stop for r in some):2d}"
            f"  over {len(over):3d}, saved {mean(r.saved for r in over):4.2f}  alarms {sum(State.BROKEN in r.states for r in some):2d}, "
            f"false {sum(r.false_alarm for r in some):2d}, held {sum(bool(r.held) for r in some):2d}, false {sum(r.false_hold for r in some):2d}"
        )


def mean(values: Iterable[float]) -> float:
    kept = [float(v) for v in values]
    return sum(kept) / len(kept) if kept else float("nan")


if __name__ == "__main__":
    main()
