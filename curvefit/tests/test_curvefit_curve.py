"""Invalid points raise errors that name the point and what to do; segments."""

from __future__ import annotations

import numpy as np
import pytest

import scalerl_curvefit as cf


@pytest.mark.parametrize(
    ("compute", "reward", "options", "error", "says"),
    [
        ([1, 2, 3], [0.1, 0.2], {}, cf.ShapeError, "one reward a point"),
        ([[1, 2]], [0.1], {}, cf.ShapeError, "one non-empty column"),
        ([], [], {}, cf.ShapeError, "non-empty"),
        (["a", "b"], [0.1, 0.2], {}, cf.ShapeError, "compute is not a column of numbers"),
        ([1, 2, float("nan")], [0.1, 0.2, 0.3], {}, cf.NonFiniteError, r"compute\[2\] is nan"),
        ([1, 2, 3], [0.1, float("inf"), 0.3], {}, cf.NonFiniteError, r"reward\[1\] is inf"),
        ([-1, 2, 3], [0.1, 0.2, 0.3], {}, cf.NegativeComputeError, r"compute\[0\] is -1"),
        ([1, 3, 2], [0.1, 0.2, 0.3], {}, cf.UnsortedComputeError, "goes back at point 2: 3 → 2"),
        ([1, 2, 2], [0.1, 0.2, 0.3], {}, cf.DuplicateComputeError, "points 1 and 2"),
        ([1, 2, 3], [0.1, 0.2, 1.3], {}, cf.RewardRangeError, r"reward\[2\] is 1.3"),
        ([1, 2, 3], [0.1, -0.2, 0.3], {}, cf.RewardRangeError, "SIGNED_SCALE"),
        ([1, 2], [0.1, 0.2], {"scale": (1, 0)}, cf.RewardRangeError, "lowest < highest"),
        ([1, 2], [0.1, 0.2], {"samples": [10, 0]}, cf.SamplesError, r"samples\[1\] is 0"),
        ([1, 2], [0.1, 0.2], {"samples": [10]}, cf.ShapeError, "samples has 1"),
        ([1, 2], [0.1, 0.2], {"eval_version": ["v1"]}, cf.ShapeError, "eval_version has 1"),
    ],
)
def test_curve_invalid_points_raise_named_error(compute, reward, options, error, says) -> None:
    with pytest.raises(error, match=says):
        cf.Curve(compute, reward, **options)


@pytest.mark.parametrize(
    ("points", "error", "says"),
    [
        (([1, 2], [0.1, 0.2]), cf.TooFewPointsError, "2 points"),
        (([0, 1, 2, 3], [0.1, 0.1, 0.2, 0.3]), cf.TooFewPointsError, "3 points at compute > 0"),
        (([1, 2, 3, 4, 5], [0.2] * 5), cf.ConstantRewardError, "all 5 rewards are 0.2"),
    ],
)
def test_fit_without_enough_distinct_points_raises(points, error, says) -> None:
    with pytest.raises(error, match=says):
        cf.fit(cf.Curve(*points))


def test_errors_derive_from_curve_error() -> None:
    errors = [value for name, value in vars(cf).items() if name.endswith("Error")]
    assert len(errors) == 15
    assert all(issubclass(error, cf.CurveError) and issubclass(error, ValueError) for error in errors)


def test_curve_signed_scale_maps_rewards_to_pass_rates() -> None:
    curve = cf.Curve([1, 2, 3], [-1.0, 0.0, 1.0], scale=cf.SIGNED_SCALE)
    np.testing.assert_allclose(curve.reward, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(curve.head(2).reward, [0.0, 0.5])


def test_curve_is_immutable() -> None:
    values = np.array([0.1, 0.2, 0.3])
    curve = cf.Curve([1, 2, 3], values)
    values[0] = 0.9
    assert curve.reward[0] == 0.1
    with pytest.raises(ValueError, match="read-only"):
        curve.reward[0] = 0.5


def test_segments_new_recipe_restarts_compute_at_zero() -> None:
    curve = cf.Curve([1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.3, 0.4], recipe=["a", "a", "a", "b", "b"])
    with pytest.raises(cf.MixedSegmentsError, match="changes at point 3"):
        cf.fit(curve)
    first, second = curve.segments()
    assert (first.start, second.start) == (0.0, 3.0)
    np.testing.assert_array_equal(second.curve.compute, [1.0, 2.0])


def test_segments_new_eval_version_keeps_compute_axis() -> None:
    curve = cf.Curve([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.3], eval_version=["v1", "v1", "v2", "v2"])
    _, second = curve.segments()
    assert second.start == 0.0
    np.testing.assert_array_equal(second.curve.compute, [3.0, 4.0])


def test_head_keeps_points_and_scale() -> None:
    curve = cf.Curve([1, 2, 3], [-0.3, 0.1, 0.7], samples=5, recipe="a", scale=cf.SIGNED_SCALE)
    head = curve.head(2)
    np.testing.assert_array_equal(head.reward, curve.reward[:2])
    assert (len(head), head.recipe, head.scale) == (2, ("a", "a"), cf.SIGNED_SCALE)
    with pytest.raises(cf.ShapeError, match="the first 0 of 3"):
        curve.head(0)
