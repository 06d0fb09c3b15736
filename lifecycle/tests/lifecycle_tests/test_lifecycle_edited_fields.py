"""Which fields a failure names as edited: those of the user's last edits, as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_api.load import accepted_run
from scalerl_api.status import RunStatus
from scalerl_lifecycle.edits_of_run import as_accepted, edits_since

EXAMPLE = yaml.safe_load(
    (Path(__file__).parents[3] / "examples/tiny/run-kubernetes.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"coordinator": {}}, ()),
        ({"coordinator": {}, "seed": 5}, ("seed",)),
        ({"coordinator": {"podTemplate": {"labels": {}}}, "seed": 5}, ("seed",)),
        ({"schedule": {"byLength": {}}}, ("schedule.byLength",)),
    ],
    ids=str,
)
def test_sections_that_a_revert_leaves_empty_are_no_edits(
    change: dict[str, Any], found: tuple[str, ...]
) -> None:
    before, _ = as_accepted(EXAMPLE["spec"])
    spec = EXAMPLE["spec"] | change
    text, _ = as_accepted(spec)
    accepted = accepted_run(EXAMPLE | {"spec": spec}).spec
    _, edited = edits_since(RunStatus(accepted_spec=before), accepted, spec, text)
    assert edited == found
