"""What ``scalerl fit`` prints of a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scalerl_cli.main import main


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["fit", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["fit", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out
