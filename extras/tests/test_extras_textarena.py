"""The environment ``textarena`` without its package; ``tests/local/test_local_textarena.py`` plays its games."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from scalerl_api.source import EvaluationTaskSpec
from scalerl_extras.textarena_games import RELEASE, TextArena, main
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.grading.grading_pool import GradingError
from scalerl_tasks.open_graders import open_grading_pool

INSTALL = f"pip install 'scalerl-extras[textarena]', which is textarena=={RELEASE}; on a cluster in the images of generator and trainer"


@pytest.fixture
def absent() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("textarena")


@pytest.mark.usefixtures("absent")
async def test_missing_package_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="textarena is not installed here") as raised:
        TextArena("GuessTheNumber-v0")
    assert str(raised.value).endswith(INSTALL)
    assert main(["GuessTheNumber-v0", "3"]) == 2
    assert INSTALL in capsys.readouterr().err

    (tmp_path / "data.jsonl").write_text('{"prompt": "a game", "answer": "-", "metadata": {"seed": 1}}\n')
    environment = {"name": "textarena", "parameters": {"game": "GuessTheNumber-v0"}}
    task = EvaluationTaskSpec.model_validate({"jsonl": {"path": "data.jsonl"}, "environment": environment})
    with pytest.raises((VerifierError, GradingError), match=r"scalerl-extras\[textarena\]"):
        async with open_grading_pool(task, directory=tmp_path):
            pass


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its games may differ for the same seed, and the curve would not say so."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(VerifierError, match=r"textarena is 0.8.0 here: pip install 'scalerl-extras"):
        TextArena("GuessTheNumber-v0")


def test_the_extra_is_that_release() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"] == {"textarena": [f"textarena=={RELEASE}"]}


@pytest.mark.parametrize("arguments", [[], ["GuessTheNumber-v0"], ["GuessTheNumber-v0", "-1"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "GAME COUNT" in capsys.readouterr().err
