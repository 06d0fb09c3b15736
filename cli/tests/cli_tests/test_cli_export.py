"""``scalerl export`` as a person calls it; the trainer's tests look at what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalerl_cli import results as module
from scalerl_cli.main import main


def test_run_without_checkpoints_is_refused(tmp_path: Path, capfd: Any) -> None:
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "out"), "--step", "3"]) == 2
    assert f"{tmp_path}/checkpoints holds no checkpoint" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_trainer_packages_are_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert "needs the trainer's packages: use the trainer's image" in capsys.readouterr().err
