"""The directory of a run, read for the page. All methods block; the server calls them in threads."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from scalerl_analysis.appended import Appended
from scalerl_analysis.metric_series import MetricSeries
from scalerl_analysis.rollout_search import FoundRollouts, find_rollouts
from scalerl_analysis.timeline import Timeline
from scalerl_api.health import health
from scalerl_api.paths import RunPaths
from scalerl_api.rollouts import TOKEN_COLUMNS
from scalerl_cli import argument_types
from scalerl_cli.arguments import ROLLOUT_CONDITIONS, add_options
from scalerl_cli.exits import Refused
from scalerl_cli.output import shown
from scalerl_cli.page.curve import curve, other_curves
from scalerl_cli.rollouts import conditions, prepare_search

MAX_ROWS: Final = 200
"""Rollouts of a response."""
_MAX_FULL_ROWS: Final = 8
_MAX_DECISIONS: Final = 400
_HEAD, _TAIL = 400, 120
"""Characters of a completion in a list."""
_PROMPT_COLUMNS: Final = ("step", "split", "task", "sample", "reward", "tokens")
_MAX_PROMPT_ROWS: Final = 20_000


class NotARun(Refused):
    """The directory cannot be shown; the message has the reason."""


class Query(Exception):
    """A request has a condition that cannot be read; the message names it."""


class Run:
    """A run in a directory, which may go on meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Raises :class:`NotARun`."""
        self.directory, self.paths = directory, RunPaths(directory)
        paths = self.paths
        if not directory.is_dir():
            raise NotARun(f"{directory}: no such directory")
        if not any(path.exists() for path in (paths.run_file, paths.metrics, paths.curve, paths.rollouts)):
            raise NotARun(f"{directory} is not the directory of a run")
        self.name = _name(paths.run_file) or directory.resolve().name
        self.note = ""
        """What a reader should know about the files."""
        self._lock = threading.Lock()
        self._series = MetricSeries(paths.metrics)
        self._timeline = Timeline(paths.trace, self._series)
        self._decision_lines = Appended(paths.decisions)
        self._decisions: list[dict[str, Any]] = []
        self._decided = 0
        self._curve: tuple[Any, dict[str, Any]] = None, {}

    # --- what is polled ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Sentences on the run, and a revision of each part: it changes with the part."""
        with self._lock:
            self._series.update()
            self._read_decisions()
            series = self._series
            row = series.row(-1) if series.rows else {}
            steps = int(row["step"]) + 1 if row else 0
        return {
            "name": self.name,
            "directory": str(self.directory),
            "note": self.note,
            "steps": steps,
            "reward": row.get("reward"),
            "tokens": row.get("mean_completion_tokens"),
            "health": health(series.steps()) if series.rows else None,
            "ended": self._ended(steps),
            "changed": self._changed(),
            "revisions": {
                "series": series.revision,
                "curve": _stamps(*self._curve_files()),
                "rollouts": _stamp(self.paths.rollouts),
                "timeline": f"{series.revision} {_stamp(self.paths.trace)}",
                "decisions": self._decided,
            },
        }

    def _ended(self, steps: int) -> str | None:
        """Why the run ended; None while it goes on, was killed, or has trained more ``steps`` since."""
        try:
            summary = json.loads(self.paths.summary.read_text(encoding="utf-8"))
            return str(summary["stop_reason"]) if summary["steps"] >= steps else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _changed(self) -> float | None:
        """Seconds since a file of the run changed."""
        times = []
        for path in (self.paths.metrics, self.paths.curve, self.paths.rollouts, self.paths.journal):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(0.0, time.time() - max(times)) if times else None

    # --- parts ------------------------------------------------------------------------------------------

    def metrics(self, names: list[str] | None) -> dict[str, Any]:
        """MetricSeries by name: of ``names``, or of all metrics the names alone."""
        with self._lock:
            known = sorted(self._series.columns)
            if names is None:
                return {"names": known}
            return {"series": {name: self._series.points(name) for name in names if name in known}}

    def curve(self) -> dict[str, Any]:
        """The forecast's curve, with its fit, and the points of other evaluation sets."""
        main, *others = self._curve_files()
        stamp = _stamps(main, *others)
        if self._curve[0] != stamp or not self._curve[1]:
            self._curve = stamp, curve(main) | {"others": other_curves(others)}
        return self._curve[1]

    def _curve_files(self) -> list[Path]:
        return [self.paths.curve, *sorted(self.directory.glob("curve-*.csv"))]

    def timeline(self, last: int | None, count: int) -> dict[str, Any]:
        evaluated = self.curve()["ends"]  # fits the curve: not with the lock
        with self._lock:
            self._timeline.update()
            return self._timeline.window(last, count, evaluated)

    def perfetto(self) -> dict[str, Any]:
        with self._lock:
            self._series.update()
            self._timeline.update()
            return self._timeline.perfetto()

    def decisions(self) -> dict[str, Any]:
        with self._lock:
            return {"decisions": self._decisions[::-1], "of": self._decided}

    def _read_decisions(self) -> None:
        for is_other, lines in self._decision_lines.read():
            if is_other:
                self._decisions, self._decided = [], 0
            self._decided += len(lines)
            made = (_decision(line) for line in lines[-_MAX_DECISIONS:])
            self._decisions += [one for one in made if one is not None]
        self._decisions = self._decisions[-_MAX_DECISIONS:]

    # --- rollouts ---------------------------------------------------------------------------------------

    def rollouts(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the matching rollouts, long texts cut unless ``full``. Raises :class:`Query` and ``AnalysisProblem``."""
        notes: list[str] = []
        arguments, full = self._arguments(query), query.get("full") == "1"
        most = _MAX_FULL_ROWS if full else MAX_ROWS
        arguments.limit = min(arguments.limit or most, most)
        found = self._find(arguments, offset=arguments.offset, tokens=full, report=notes.append)
        of = {"matching": found.matching, "total": found.total, "offset": arguments.offset, "notes": notes}
        return {"rows": [_shown(row, full) for row in found.rows]} | of

    def prompt(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The steps with recorded completions of one prompt, each with their number and mean reward."""
        arguments = self._arguments(query)
        arguments.limit = _MAX_PROMPT_ROWS
        found_rows = self._find(arguments, columns=_PROMPT_COLUMNS, report=lambda _: None).rows
        steps: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in found_rows:
            steps.setdefault((row["split"], row["task"], row["step"]), []).append(row)
        found = []
        for (split, task, step), members in steps.items():
            rewards = [row["reward"] for row in members if row["reward"] is not None]
            mean = sum(rewards) / len(rewards) if rewards else None
            of = {"split": split, "task": task, "step": step}
            found.append({**of, "completions": len(members), "reward": mean})
        return {"steps": found}

    def _find(self, arguments: argparse.Namespace, **options: Any) -> FoundRollouts:
        """Search; gives the memory of the search back."""
        prepare_search()
        try:
            return find_rollouts(self.directory, conditions(arguments), limit=arguments.limit, **options)
        finally:
            if find_spec("pyarrow") is not None:
                import pyarrow

                pyarrow.default_memory_pool().release_unused()

    def _arguments(self, query: Mapping[str, str]) -> argparse.Namespace:
        """The conditions of a request, by the parser of ``scalerl rollouts``."""
        parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
        add_options(parser, ROLLOUT_CONDITIONS)
        parser.add_argument("--offset", type=argument_types.whole, default=0)
        defaults = vars(parser.parse_args([]))
        words = [
            f"--{name}" if defaults[name] is False else f"--{name}={value}"
            for name, value in query.items()
            if name in defaults and (value == "1" if defaults[name] is False else value.strip())
        ]
        parser.set_defaults(limit=MAX_ROWS)
        try:
            return parser.parse_args(words)
        except argparse.ArgumentError as error:
            raise Query(str(error)[:200]) from None


def _decision(line: bytes) -> dict[str, Any] | None:
    """What is shown of a decision; None of a line of another release."""
    try:
        made = json.loads(line)
        decision = made["decision"]
        action = {name: value for name, value in (decision.get("action") or {}).items() if value}
        return {name: made[name] for name in ("sequence", "time", "policy")} | {
            "state": decision["state"],
            "reasons": decision["reasons"],
            "advice": decision.get("advice", []),
            "action": action,
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _shown(row: dict[str, Any], full: bool) -> dict[str, Any]:
    """A row with texts without characters that control a display, and not too long."""
    found = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    if full:
        found["by_token"] = _by_token(row)
    for name in ("labels", "parts"):
        of = (found[name] or {}).items()
        found[name] = {shown(key): shown(one) if isinstance(one, str) else one for key, one in of}
    for name in ("prompt", "completion", "reference", "error"):
        if (text := found[name]) is not None:
            cut = not full and len(text) > _HEAD + _TAIL
            found[name] = shown(text[:_HEAD] if cut else text)
            if cut:
                found[f"{name}_cut"] = len(text) - _HEAD - _TAIL
                found[f"{name}_tail"] = shown(text[-_TAIL:])
    return found


def _by_token(row: dict[str, Any]) -> list[tuple[str, int, float | None]]:
    """Of each token of the completion: the text that it adds, the version that sampled it (negative if none did), and the
    difference of its log-probabilities, None where it is not known. Empty if the row has no figures of its tokens."""
    ends, versions, differences = (row.get(name) or [] for name in TOKEN_COLUMNS)
    differences = differences or [None] * len(ends)
    completion = row["completion"] or ""
    if not ends or not len(ends) == len(versions) == len(differences) or ends[-1] != len(completion):
        return []
    texts = [completion[begin:end] for begin, end in pairwise([0, *ends])]
    return list(zip(map(shown, texts), versions, differences, strict=True))


def _stamp(path: Path) -> str:
    """Changes with a file, or with the names in a directory."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def _stamps(*paths: Path) -> str:
    return " ".join(map(_stamp, paths))


def _name(run_file: Path) -> str | None:
    """The run's name; None of a file that this release cannot read."""
    import yaml

    try:
        return str(yaml.safe_load(run_file.read_bytes())["metadata"]["name"])
    except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return None
