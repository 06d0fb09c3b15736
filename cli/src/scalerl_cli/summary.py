"""``summary.json``, and its content as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from scalerl_analysis.table import aligned
from scalerl_api.mismatch import ALL, SOURCES
from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import INTERRUPTED
from scalerl_cli import labels
from scalerl_cli.output import replace_text
from scalerl_local.run_view import RunResult


def summarize(run: ScaleRLRun, outcome: RunResult) -> dict[str, Any]:
    """Result of a run, as JSON values.

    ``startup``, ``restarts`` and ``peak_memory_bytes`` are of this command; all other values cover the whole run,
    including the time before it was resumed. Those of a fork include the source's steps, but not its time and device-hours.

    Args:
        outcome: one with a status of the coordinator.
    """
    status, decision = outcome.status, outcome.decision
    assert status is not None
    first, last = (status.points[0], status.points[-1]) if status.points else (None, None)
    reason = status.stop_reason or (INTERRUPTED if outcome.interrupted else "")
    if outcome.failure is not None:
        reason = f"failed: {outcome.failure.unit}: {outcome.failure.reason}"
    return {
        "run": run.metadata.name,
        "forked_from": None if run.spec.fork is None else run.spec.fork.run,
        "forked_step": None if status.forked_step < 0 else status.forked_step,
        "stop_reason": reason,
        "steps": status.step,
        "first_reward": first and first.reward,
        "last_reward": last and last.reward,
        "first_reward_standard_error": first and first.standard_error,
        "last_reward_standard_error": last and last.standard_error,
        "last_pass_at": {} if last is None else {at.k: [at.mean, at.low, at.high] for at in last.pass_at},
        "evaluations": len(status.points),
        "wall_seconds": status.own_seconds,
        "device_hours": status.own_device_seconds / 3600,
        "tokens_generated": status.tokens_generated,
        "tokens_trained": status.tokens_trained,
        "generator_busy_fraction": status.generator_busy_fraction,
        "trainer_busy_fraction": status.trainer_busy_fraction,
        "max_staleness_steps": status.max_staleness_steps,
        "mean_staleness_steps": status.mean_staleness_steps,
        **{f"{source}_kl": status.mismatch_kl(source) for source in SOURCES},
        "mismatch_by_position": {
            source: {m.positions: m.kl for m in status.mismatch if m.source == source and m.positions != ALL}
            for source in SOURCES
        },
        "skipped_steps": status.skipped_steps,
        "checkpoint_failures": status.checkpoint_failures,
        "grading_errors": status.grading_errors,
        "uploads": msgspec.to_builtins(status.uploads),
        "exports": msgspec.to_builtins(status.exports),
        "trackers": msgspec.to_builtins(status.trackers),
        "counts": msgspec.structs.asdict(status.counts),
        "startup": asdict(outcome.startup),
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "restarts": outcome.restarts,
        "decision": decision and {"state": decision.state.value, "reasons": decision.reasons},
    }


def write(path: Path, summary: dict[str, Any]) -> None:
    """Replace the file atomically."""
    replace_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def table(summary: dict[str, Any]) -> str:
    """The table for standard output."""
    return "\n".join([summary["run"], *aligned(rows(summary))])


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table: name and formatted value."""
    counts, startup = summary["counts"], summary["startup"]
    sampled, probe = (labels.number(summary[name], ".2g") for name in ("sampled_kl", "probe_kl"))
    waited = ", ".join(f"{what} {labels.seconds(s)}" for what, s in startup["waited_seconds"].items())
    rollouts = (
        f"{counts['trained']:,} trained + {counts['filtered']:,} filtered + {counts['queued']:,} queued"
    )
    skipped = f" + {counts['skipped']:,} skipped" if counts["skipped"] else ""
    staleness = f"{summary['mean_staleness_steps']:.2f} mean, {summary['max_staleness_steps']} max"
    start = labels.seconds(startup["first_lease_seconds"]) + (f" ({waited})" if waited else "")
    source = f"{summary['forked_from']}, step {summary['forked_step']}"
    return [
        *([("forked from", source)] if summary["forked_from"] else []),
        ("ended by", summary["stop_reason"]),
        ("steps", f"{summary['steps']:,}"),
        *((f"reward, {which}", _reward(summary, which)) for which in ("first", "last")),
        *(
            (f"pass@{k}, last", f"{mean:.3f} ({low:.3f}–{high:.3f})")
            for k, (mean, low, high) in summary["last_pass_at"].items()
        ),
        ("time since training began", labels.seconds(summary["wall_seconds"])),
        ("device-hours", f"{summary['device_hours']:.3f}"),
        ("tokens generated", f"{summary['tokens_generated']:,}"),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("generators busy", f"{summary['generator_busy_fraction']:.0%}"),
        ("trainer busy", f"{summary['trainer_busy_fraction']:.0%}"),
        ("staleness, steps", staleness),
        ("mismatch (KL)", f"{sampled} sampled, {probe} probe"),
        ("rollouts", f"{counts['acknowledged']:,} = {rollouts}{skipped}"),
        ("start to first lease", start),
        ("peak memory", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"),
        *_exceptions(summary),
    ]


def _exceptions(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of what only some runs have."""
    counts = summary["counts"]
    if summary["decision"]:
        yield "forecast", f"{summary['decision']['state']}: {summary['decision']['reasons'][0]}"
    for role in ("best", "last"):
        if model := (summary["exports"] or {}).get(role):
            yield f"model, {role}", model["path"] + (f", {model['uri']}" if model["uri"] else "")
    yield from ((f"tracker {t['name']}", t["problem"]) for t in summary["trackers"] if t["problem"])
    if summary["skipped_steps"]:
        yield "steps skipped", f"{summary['skipped_steps']:,}"
    if summary["checkpoint_failures"]:
        yield "checkpoints not written", f"{summary['checkpoint_failures']:,}"
    if uploads := summary["uploads"]:
        problem = f", {uploads['problem']}" if uploads["problem"] else ""
        yield "checkpoint in checkpoint.to", f"{uploads['version']}{problem}"
    if summary["grading_errors"]:
        yield "completions not graded", f"{summary['grading_errors']:,}"
    if counts["given_up"]:
        yield "rollouts given up", f"{counts['given_up']:,}, {counts['too_long']:,} for their length"
    if counts["masked_tokens"]:
        yield "tokens masked", f"{counts['masked_tokens']:,}"
    if counts["timed_out_leases"]:
        yield "leases timed out", f"{counts['timed_out_leases']:,}"
    if summary["restarts"]:
        yield "restarts", ", ".join(f"{name} {n}" for name, n in summary["restarts"].items())


def _reward(summary: dict[str, Any], which: str) -> str:
    value, error = summary[f"{which}_reward"], summary[f"{which}_reward_standard_error"]
    return labels.UNKNOWN if value is None else f"{value:.3f} ± {1.96 * error:.3f}"
