"""The rows of ``mid-training.jsonl``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line to ``mid-training.jsonl``. A failed write, such as on a full disk, is only logged."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        log.error("cannot write %s: %s", path, error.strerror)


def keep_rows(path: Path, steps: int) -> None:
    """Drop the rows from step ``steps`` on, which are trained again, and lines truncated by a crash or a full disk."""

    def is_kept(line: str) -> bool:
        try:
            return line.endswith("\n") and json.loads(line)["step"] < steps
        except (ValueError, LookupError, TypeError):
            return False

    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        staged = path.with_name(f".{path.name}")
        staged.write_text("".join(kept), encoding="utf-8")
        staged.rename(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.error("cannot write %s: %s", path, error.strerror)
