"""A record of decisions, written when attributes in Python still had the names that these keys have."""

from __future__ import annotations

import gzip
from pathlib import Path

from scalerl_api.forecast import Collapse
from scalerl_autoscaling.models import State
from scalerl_autoscaling.replay import verify

RECORD = gzip.decompress((Path(__file__).parent / "golden/decisions-earlier-names.jsonl.gz").read_bytes())


def test_record_of_decisions_is_read_and_repeated() -> None:
    for key in ("streak", "forgiven", "was_healthy", "settled", "reach", "pays", "doubts", "guard", "fall"):
        assert f'"{key}":'.encode() in RECORD
    lines, found = verify(RECORD)
    assert (len(lines), found) == (4, [])
    assert [line.decision.history.consecutive_votes for line in lines][-2:] == [1, 1]
    assert lines[-1].decision.state is State.BROKEN
    answer = lines[-1].observation.forecast
    assert answer is not None
    assert isinstance(answer.collapse_check.collapse, Collapse)
