"""The table of a curve, written and read again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.curve import curve_csv, curve_figures, curve_points, fold_labels, label_order
from scalerl_api.wire import EvaluationPoint, PassAt

COUNT = st.integers(0, 10**12)
THOUSANDTHS = st.integers(0, 10**9).map(lambda n: n / 1000)
POINT = st.builds(
    EvaluationPoint,
    version=COUNT,
    work_tokens=COUNT,
    reward=st.floats(allow_nan=False),
    standard_error=st.floats(0, 1),
    samples=COUNT,
    prompts=COUNT,
    set_digest=st.text("0123456789abcdef", min_size=1, max_size=16),
    mixed_versions=st.booleans(),
    truncated_fraction=st.integers(0, 10**6).map(lambda n: n / 10**6),
    mean_tokens=THOUSANDTHS,
    wall_seconds=THOUSANDTHS,
    device_seconds=THOUSANDTHS,
    given_up_prompts=COUNT,
    parts=st.dictionaries(st.sampled_from(["process", "outcome"]), st.floats(-1, 1)),
    pass_at=st.lists(st.sampled_from([2, 4, 16]), unique=True).map(
        lambda ks: [PassAt(k, k / 100, k / 200, k / 50) for k in sorted(ks)]
    ),
)


@given(st.lists(POINT, max_size=5))
def test_curve_round_trip(points: list[EvaluationPoint]) -> None:
    """Also where some points have columns that others do not have."""
    text = curve_csv(points)
    assert curve_points(text) == points
    for point, figures in zip(points, curve_figures(text), strict=True):
        assert {name: value for name, value in figures.items() if name.startswith("reward_part_")} == {
            f"reward_part_{name}": value for name, value in point.parts.items()
        }
        for at in point.pass_at:
            assert [figures[f"pass_at_{at.k}{limit}"] for limit in ("", "_low", "_high")] == [
                *(at.mean, at.low, at.high)
            ]


def test_missing_columns_are_0() -> None:
    (point,) = curve_points("compute,reward,samples,version,mixed_versions,eval_version\n9,0.5,16,3,true,a\n")
    assert (point.work_tokens, point.reward, point.mixed_versions, point.set_digest) == (9, 0.5, True, "a")
    assert (point.prompts, point.wall_seconds) == (0, 0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reward,compute\n0.5,10\n", "no column"),
        ("compute,reward,samples,version,mixed_versions,eval_version\n9,much,16,3,true,a\n", "row 1"),
        ("compute,reward,samples,version,mixed_versions,eval_version\n9,0.5\n", "row 1"),
        ('"', "no curve"),
    ],
)
def test_invalid_curve_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        curve_points(text)


def test_rare_values_of_a_label_are_folded_and_counted() -> None:
    labels = [{"topic": f"t{n % 40}"} for n in range(60)]
    folded = fold_labels(labels)
    assert len({one["topic"] for one in folded}) == 17
    assert sum(one["topic"] == "other" for one in folded) == 60 - 2 * 16


def test_many_numbers_become_ranges_of_as_many_prompts() -> None:
    folded = [one["difficulty"] for one in fold_labels([{"difficulty": f"{n / 1000}"} for n in range(1000)])]
    assert len(set(folded)) == 16
    assert set(Counter(folded).values()) == {62, 63}
    assert sorted(set(folded), key=lambda value: label_order("difficulty", value))[:2] == [
        "0.0 to 0.061",
        "0.062 to 0.124",
    ]
    mostly_one = fold_labels([{"operations": str(min(n, 30))} for n in range(1000)])
    assert Counter(one["operations"] for one in mostly_one).most_common(1)[0][0] == "30"
