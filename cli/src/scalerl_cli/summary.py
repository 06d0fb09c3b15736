"""``summary.json``, and its content as a table."""

from __future__ import annotations

import json
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

    Raises:
        ValueError: the outcome has no status of the coordinator.
    """
    status = outcome.status
    if status is None:
        raise ValueError("no status: the coordinator never answered")
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
        "first_reward": None if first is None else first.reward,
        "last_reward": None if last is None else last.reward,
        "first_reward_standard_error": None if first is None else first.standard_error,
        "last_reward_standard_error": None if last is None else last.standard_error,
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
        "decision": None
        if outcome.decision is None
        else {"state": outcome.decision.state.value, "reasons": outcome.decision.reasons},
    }


def write(path: Path, summary: dict[str, Any]) -> None:
    """Replace the file atomically."""
    replace_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table: name and formatted value."""
    counts, startup = summary["counts"], summary["startup"]
    waited = ", ".join(f"{what} {labels.seconds(s)}" for what, s in startup["waited_seconds"].items())
    found = [
        *(
            [("forked from", f"{summary['forked_from']}, step {summary['forked_step']}")]
            if summary["forked_from"]
            else []
        ),
        ("ended by", summary["stop_reason"]),
        ("steps", f"{summary['steps']:,}"),
        ("reward, first", _reward(summary, "first")),
        ("reward, last", _reward(summary, "last")),
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
        (
            "staleness, steps",
            f"{summary['mean_staleness_steps']:.2f} mean, {summary['max_staleness_steps']} max",
        ),
        (
            "mismatch (KL)",
            f"{labels.divergence(summary['sampled_kl'])} sampled, {labels.divergence(summary['probe_kl'])} probe",
        ),
        (
            "rollouts",
            f"{counts['acknowledged']:,} = {counts['trained']:,} trained + {counts['filtered']:,} filtered "
            f"+ {counts['queued']:,} queued"
            + (f" + {counts['skipped']:,} skipped" if counts["skipped"] else ""),
        ),
        (
            "start to first lease",
            labels.seconds(startup["first_lease_seconds"]) + (f" ({waited})" if waited else ""),
        ),
        ("peak memory", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ]
    return found + _exceptions(summary)


def _exceptions(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of what only some runs have."""
    counts = summary["counts"]
    found: list[tuple[str, str]] = []
    if summary["decision"]:
        found.append(("forecast", f"{summary['decision']['state']}: {summary['decision']['reasons'][0]}"))
    for role in ("best", "last"):
        model = (summary["exports"] or {}).get(role)
        if model is not None:
            found.append((f"model, {role}", model["path"] + (f", {model['uri']}" if model["uri"] else "")))
    found += [(f"tracker {t['name']}", t["problem"]) for t in summary["trackers"] if t["problem"]]
    if summary["skipped_steps"]:
        found.append(("steps skipped", f"{summary['skipped_steps']:,}"))
    if summary["checkpoint_failures"]:
        found.append(("checkpoints not written", f"{summary['checkpoint_failures']:,}"))
    if uploads := summary["uploads"]:
        problem = f", {uploads['problem']}" if uploads["problem"] else ""
        found.append(("checkpoint in checkpoint.to", f"{uploads['version']}{problem}"))
    if summary["grading_errors"]:
        found.append(("completions not graded", f"{summary['grading_errors']:,}"))
    if counts["given_up"]:
        found.append(
            ("rollouts given up", f"{counts['given_up']:,}, {counts['too_long']:,} for their length")
        )
    if counts["masked_tokens"]:
        found.append(("tokens masked", f"{counts['masked_tokens']:,}"))
    if counts["timed_out_leases"]:
        found.append(("leases timed out", f"{counts['timed_out_leases']:,}"))
    if summary["restarts"]:
        found.append(("restarts", ", ".join(f"{name} {n}" for name, n in summary["restarts"].items())))
    return found


def _reward(summary: dict[str, Any], which: str) -> str:
    value, error = summary[f"{which}_reward"], summary[f"{which}_reward_standard_error"]
    return labels.UNKNOWN if value is None else f"{value:.3f} ± {1.96 * error:.3f}"


def table(summary: dict[str, Any]) -> str:
    """The table for standard output."""
    return "\n".join([summary["run"], *aligned(rows(summary))])
