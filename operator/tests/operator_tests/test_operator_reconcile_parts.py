"""The steps of a reconcile are those that are documented, and none changes the part of another."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from scalerl_operator.controller import parts, reconcile

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


@pytest.mark.parametrize(
    "part", [parts.Run, parts.Accepted, parts.Observed, parts.PodView, parts.Checks, parts.Findings]
)
def test_parts_are_frozen(part: type) -> None:
    first = dataclasses.fields(part)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(object.__new__(part), first, None)


def test_architecture_names_the_steps_of_the_reconcile() -> None:
    steps = re.findall(r"^\d\. (\w+)", reconcile.__doc__ or "", re.MULTILINE)
    assert len(steps) == 8
    assert " → ".join(steps) in ARCHITECTURE.read_text()
