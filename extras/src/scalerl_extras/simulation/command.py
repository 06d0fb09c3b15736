"""``scalerl simulate``: simulates the work of a trace under another schedule, or on another cluster."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace

from scipy.stats import ks_2samp

from scalerl_api.registry import Kind, PluginError, make
from scalerl_cli.exits import DONE, Refused
from scalerl_cli.output import echo
from scalerl_coordinator.scheduling import ByLength, LeastLoaded, SchedulingPolicy
from scalerl_coordinator.slots import OffPolicy
from scalerl_extras.simulation.baselines import HistoPipe, RoundRobin, SlotOrder, april, tail_batching
from scalerl_extras.simulation.simulator import simulate
from scalerl_extras.simulation.speeds import fit_decode, fit_trainer, publish_seconds
from scalerl_extras.simulation.trace_file import RunTrace, TraceProblem, read_trace
from scalerl_extras.simulation.workload import (
    Cluster,
    DecodeSpeed,
    Drafts,
    Outcome,
    Workload,
    from_history,
    known,
    lower_bound,
)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    path = arguments.trace / "trace.jsonl" if arguments.trace.is_dir() else arguments.trace
    try:
        run = read_trace(path)
    except FileNotFoundError as problem:
        raise Refused(f"{path}: no such file; a run writes it with spec.trace: true") from problem
    except (OSError, TraceProblem) as problem:
        raise Refused(f"{path}: {problem}") from problem
    cluster = _cluster(run, arguments)
    if cluster.decode.seconds(1) <= 0:
        raise Refused(
            f"{path}: no group with a measured duration, so the speed of generation is unknown; give --decode"
        )
    scheme = _scheme(run, arguments.max_staleness_steps)
    names = arguments.policy or [run.settings.schedule or "slotOrder"]
    work = run.work
    drafted = {_name(drafts): _with_drafts(work, drafts) for drafts in arguments.drafts or ["traced"]}
    outcomes = {
        f"{name}, {drafts}" if len(drafted) > 1 else name: _simulated(name, of, cluster, scheme)
        for name, (drafts, of) in itertools.product(names, drafted.items())
    }
    figures = {name: _figures(outcome, work) for name, outcome in outcomes.items()}
    bound = min(lower_bound(of, cluster, scheme) for of in drafted.values())
    if arguments.json:
        decode, trainers = cluster.decode, arguments.trainers or 1
        found = {
            "traced": {"makespan": run.makespan, "steps": work.steps, "refilled": run.refilled},
            "decode": [decode.base, decode.per_sequence],
            "verify": [decode.per_draft, decode.free_rows],
            "train": [cluster.train_seconds, cluster.train_seconds_per_token * trainers],
            "publish": cluster.publish_seconds,
            "lower_bound": bound,
            "policies": figures,
            "trained_at": {name: outcome.trained_at for name, outcome in outcomes.items()},
        }
        echo(json.dumps(found))
    else:
        _echo_table(run, cluster, figures, bound)
    return DONE


def _cluster(run: RunTrace, arguments: argparse.Namespace) -> Cluster:
    """The cluster of the trace, with the options in place of its values."""
    fixed, per_token = arguments.train or fit_trainer(run)
    if arguments.decode:
        base, per_sequence = arguments.decode
        decode = DecodeSpeed(base, per_sequence, per_draft=per_sequence)
    else:
        decode = fit_decode(run)
    if arguments.verify:
        decode = replace(decode, per_draft=arguments.verify[0], free_rows=arguments.verify[1])
    return Cluster(
        arguments.generators or run.generators,
        arguments.concurrency or run.settings.concurrency,
        decode,
        fixed,
        per_token / (arguments.trainers or 1),
        publish_seconds(run) if arguments.publish is None else arguments.publish,
        arguments.max_draft_tokens or run.settings.max_draft_tokens or 16,
    )


def _echo_table(run: RunTrace, cluster: Cluster, figures: dict[str, dict[str, float]], bound: float) -> None:
    work, decode = run.work, cluster.decode
    echo(
        f"{work.steps} steps of {work.prompts_per_step} groups, {sum(g.tokens for g in work.groups)} tokens; in the trace "
        f"{run.makespan:.1f} s"
    )
    if run.refilled:
        echo(f"{run.refilled} refilled groups are left out")
    free = f" beyond {decode.free_rows:g} in a step" if decode.free_rows else ""
    echo(
        f"decoding step {1e3 * decode.base:.3g} ms + {1e3 * decode.per_sequence:.3g} ms a sequence + "
        f"{1e3 * decode.per_draft:.3g} ms a drafted token{free}; training step {cluster.train_seconds:.3g} s + "
        f"{1e3 * cluster.train_seconds_per_token:.3g} ms a token; publish {cluster.publish_seconds:.3g} s"
    )
    wide = max(map(len, ["lower bound", *figures])) + 1
    echo(
        f"{'':{wide}}{'makespan s':>11}{'s a step':>9}{'tokens/s':>10}{'idle':>6}{'batch':>6}{'staleness':>14}{'KS p':>7}"
    )
    for name, one in figures.items():
        echo(
            f"{name:{wide}}{one['makespan']:11.1f}{one['makespan'] / work.steps:9.2f}{one['tokens_per_second']:10.0f}"
            f"{one['generator_idle']:6.2f}{one['running_sequences']:6.1f}{one['mean_staleness']:9.2f} ≤{one['max_staleness']:3.0f}{one['ks_p']:7.2g}"
        )
    echo(f"{'lower bound':{wide}}{bound:11.1f}")


def _name(drafts: str | tuple[float, float]) -> str:
    return drafts if isinstance(drafts, str) else f"{drafts[0]:g}:{drafts[1]:g}"


def _with_drafts(work: Workload, drafts: str | tuple[float, float]) -> Workload:
    """The work under one value of ``--drafts``."""
    if drafts == "traced":
        return work
    of = Drafts() if isinstance(drafts, str) else Drafts.measured(*drafts)
    seen: set[tuple[int, int]] = set()
    groups = []
    for group in work.groups:
        groups.append(replace(group, drafts=of if group.prompt in seen else Drafts()))
        seen.add(group.prompt)
    return Workload(groups, work.prompts_per_step)


def _scheme(run: RunTrace, max_staleness_steps: int | None) -> OffPolicy:
    if max_staleness_steps is not None:
        return OffPolicy(max(0, max_staleness_steps))
    if run.settings.steps_per_batch:
        return OffPolicy(steps_per_batch=run.settings.steps_per_batch)
    return OffPolicy(run.settings.max_staleness_steps)


def _simulated(name: str, work: Workload, cluster: Cluster, scheme: OffPolicy) -> Outcome:
    if name == "tailBatching":
        return tail_batching(work, cluster)
    if name == "april":
        return april(work, cluster)
    policies: dict[str, SchedulingPolicy] = {
        "slotOrder": SlotOrder(),
        "roundRobin": RoundRobin(),
        "leastLoaded": LeastLoaded(),
        "histoPipe": HistoPipe(),
    }
    expected = known(work) if name == "oracle" else from_history(work)
    if name in ("byLength", "oracle"):
        policy: SchedulingPolicy = ByLength()
    else:
        policy = policies.get(name) or _installed(name)
    return simulate(work, cluster, policy, expected, scheme)


def _installed(name: str) -> SchedulingPolicy:
    """The schedule of an installed package, without parameters, which a trace does not have."""
    try:
        made: SchedulingPolicy = make(Kind.SCHEDULE, name, {})
    except PluginError as error:
        raise Refused(str(error)) from error
    return made


def _figures(outcome: Outcome, work: Workload) -> dict[str, float]:
    half = max(1, work.steps // 2)
    trained = [length for step in outcome.trained[:half] for length in step]
    in_order = [length for step in range(half) for group in work.step(step) for length in group.lengths]
    tokens = sum(outcome.staleness.values())
    return {
        "makespan": outcome.makespan,
        "tokens_per_second": outcome.trained_tokens / outcome.makespan,
        "generator_idle": outcome.generator_idle,
        "trainer_idle": 1 - outcome.trainer_busy / outcome.makespan,
        "running_sequences": outcome.running,
        "discarded": 1 - outcome.trained_tokens / outcome.generated_tokens,
        "mean_staleness": sum(age * n for age, n in outcome.staleness.items()) / max(1, tokens),
        "max_staleness": float(max(outcome.staleness, default=0)),
        "ks_p": float(ks_2samp(trained, in_order).pvalue),
    }
