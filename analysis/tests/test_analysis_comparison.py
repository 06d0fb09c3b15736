"""Comparison of recipes: at equal compute, by the rule, and as a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from curve_files import write_plain

from scalerl_analysis import Comparison, Recipe, compare
from scalerl_analysis.comparison import EqualCompute
from scalerl_analysis.reward_scale import RewardScale


def test_equal_compute_interval_is_students() -> None:
    # Mean .5, sd .1 over three runs: t(2) is 2.920.
    three = EqualCompute.of([(0.4, 0.0001), (0.5, 0.0001), (0.6, 0.0001)])
    one = EqualCompute.of([(0.5, 0.01)])
    assert three is not None
    assert one is not None
    assert three.interval is not None
    assert one.interval is not None
    assert three.interval.high == pytest.approx(0.5 + 2.920 * 0.1 / 3**0.5, abs=1e-4)
    assert one.interval.high == pytest.approx(0.5 + 1.645 * 0.1)
    apart = three.minus(three)  # t(4) is 2.132
    assert apart is not None
    assert apart.high == pytest.approx(2.132 * (2 * 0.01 / 3) ** 0.5, abs=1e-4)
    assert EqualCompute.of([(0.5, 0.0)]) is not None
    assert EqualCompute.of([(0.5, 0.0)]).interval is None  # type: ignore[union-attr]
    assert EqualCompute.of([]) is None


def test_csv_has_its_columns_in_the_order_of_earlier_releases() -> None:
    """And an empty state of a recipe without a run, where the text says so."""
    compared = Comparison((Recipe("none"),), RewardScale(0.0, 1.0))
    assert compared.csv().splitlines() == [
        "recipe,runs,state,failed,A,A_low,A_high,B,B_low,B_high,Cmid,Cmid_low,Cmid_high,R0,R0_low,R0_high,compute,reward,"
        "reward_low,reward_high,difference,difference_low,difference_high,by,better,probability,separates,"
        "separates_at_equal_compute",
        "none,0,,0" + "," * 24,
    ]
    assert compared.table().cells()[1] == ["none", "0", "–", "–", "–", "–", "no run"]


def test_comparison_tells_a_better_recipe(tmp_path: Path) -> None:
    paths = {name: [tmp_path / f"{name}-{seed}.csv" for seed in (1, 2)] for name in ("fast", "slow")}
    for seed in (0, 1):
        write_plain(paths["fast"][seed], seed=seed + 1, cmid=1000.0)
        write_plain(paths["slow"][seed], seed=seed + 3, cmid=4000.0)
    compared = compare({**paths, "none": [tmp_path / "none.csv"]})
    slow, none = compared.against
    assert slow.apart is not None
    assert slow.apart.high < 0
    assert slow.separates_at_equal_compute
    assert none.ruled is None
    assert "none.csv: No such file" in compared.recipes[2].problems[0]
    assert [row["failed"] for row in compared.table().rows] == [0, 0, 0]
