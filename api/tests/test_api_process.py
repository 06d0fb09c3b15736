from __future__ import annotations

from pathlib import Path

import pytest

from scalerl_api.process import EnvironmentProblem, ProcessEnvironment


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("secret\n")
    return {
        "SCALERL_DIR": str(tmp_path),
        "SCALERL_NAME": "generator-0",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:80/",
        "SCALERL_TOKEN_FILE": str(tmp_path / "token"),
    }


def test_process_environment_is_parsed(variables: dict[str, str], tmp_path: Path) -> None:
    found = ProcessEnvironment.read(variables)
    assert found.paths.root == tmp_path
    assert (found.name, found.token) == ("generator-0", "secret")
    assert found.coordinator_url == "http://127.0.0.1:80"
    assert found.trainer_host == "127.0.0.1"
    assert ProcessEnvironment.read(variables | {"SCALERL_TRAINER_HOST": "t-0.run"}).trainer_host == "t-0.run"


def test_token_is_never_shown(variables: dict[str, str]) -> None:
    assert "secret" not in repr(ProcessEnvironment.read(variables))


def test_all_missing_variables_are_named_at_once(variables: dict[str, str]) -> None:
    del variables["SCALERL_DIR"]
    variables["SCALERL_NAME"] = ""
    with pytest.raises(EnvironmentProblem, match=r"not set: SCALERL_DIR, SCALERL_NAME; the runtime"):
        ProcessEnvironment.read(variables)


def test_unreadable_token_names_its_file(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(EnvironmentProblem, match=r"SCALERL_TOKEN_FILE=.*/token: empty"):
        ProcessEnvironment.read(variables)
    (tmp_path / "token").unlink()
    with pytest.raises(EnvironmentProblem, match=r"/token: No such file"):
        ProcessEnvironment.read(variables)
