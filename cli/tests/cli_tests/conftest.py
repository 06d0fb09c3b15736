"""What tests of ``validate`` share: a refused file, and a machine on which every run could start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl_cli.main import main


@pytest.fixture
def any_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which build is installed where the tests run is not the tests' matter."""
    monkeypatch.setattr("scalerl_cli.inputs.vllm_problem", lambda spec: None)


@pytest.fixture
def without_the_check_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds a folder; ``test_model_with_a_missing_tensor_is_refused`` has it."""
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", lambda *_: ())


@pytest.fixture(params=["validate", "run"])
def check(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path, list[str]], None]:
    """A file is refused: exit code 2, lines that name the file and have ``words``; nothing started, nothing left."""

    def check(file: Path, words: list[str]) -> None:
        before = sorted(tmp_path.rglob("*"))
        place = ["--dir", str(tmp_path / "run")] if request.param == "run" else []
        assert main([request.param, str(file), *place]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"{file}: ")
        assert all(line.startswith((f"{file}: ", " ")) for line in err.splitlines()), err
        for word in words:
            assert word in err
        assert sorted(tmp_path.rglob("*")) == before

    return check
