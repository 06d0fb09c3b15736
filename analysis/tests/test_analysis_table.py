"""Tables as text, Markdown, CSV and JSON values."""

from __future__ import annotations

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from scalerl_analysis.table import Column, Table
from scalerl_curvefit import Estimate

COLUMNS = [
    Column("run", "run", varied=True),
    Column("share", "share", "{:.0%}".format),
    Column(
        "gain", "gain", lambda gain: f"+{gain.median}", lambda gain: Estimate(0.0, -1.0, 1.0), interval=True
    ),
    Column("cost", "cost", complete=True),
    Column("seconds"),
]


def row(run: str, share: float | None = 0.5, cost: int | None = 3) -> dict[str, object]:
    return {"run": run, "share": share, "gain": Estimate(2.0, 1.0, 3.0), "cost": cost, "seconds": 7}


def test_columns_without_a_difference_or_a_value_are_not_shown() -> None:
    """A CSV has all columns."""
    one = Table(COLUMNS, [row("a"), row("a", share=None, cost=None)], unknown="–")
    assert one.lines() == ["share  gain", "50%    +2.0", "–      +2.0"]
    two = Table(COLUMNS, [row("a"), row("b")])
    assert two.markdown()[::2] == ["| run | share | gain | cost |", "| a | 50% | +2.0 | 3 |"]
    assert one.csv().splitlines() == [
        "run,share,gain,gain_low,gain_high,cost,seconds",
        "a,0.5,0.0,-1.0,1.0,3,7",
        "a,,0.0,-1.0,1.0,,7",
    ]


def test_values_of_json_are_exported() -> None:
    (found,) = Table(COLUMNS, [row("a", cost=None)]).objects()
    gain = {"median": 0.0, "low": -1.0, "high": 1.0}
    assert found == {"run": "a", "share": 0.5, "gain": gain, "cost": None, "seconds": 7}


def test_unknown_interval_has_its_columns() -> None:
    (head, line) = Table(COLUMNS, [row("a") | {"gain": None}]).csv().splitlines()
    assert len(head.split(",")) == len(line.split(","))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"])), min_size=1))
def test_any_text_stays_in_its_cell(texts: list[str]) -> None:
    table = Table([Column("n", "n"), Column("text", "text")], [{"n": 1, "text": one} for one in texts])
    read = list(csv.DictReader(io.StringIO(table.csv(), newline="")))
    assert [one["text"] for one in read] == texts
    for line in table.markdown():
        assert line.replace("\\|", "").count("|") == 3
