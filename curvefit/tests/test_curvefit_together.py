"""What is done on a shorter way says what the plain way says."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalerl_curvefit as cf
from scalerl_curvefit.families import gain_share
from scalerl_curvefit.sidecar.malloc import keep_freed_memory
from scalerl_curvefit.sufficient_statistics import _interpolation, _no_interpolation


@settings(max_examples=25, deadline=None)
@given(n=st.integers(4, 50), seed=st.integers(0, 1000))
def test_where_every_point_is_a_knot_nothing_is_interpolated(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ln_compute, precision = np.sort(random.uniform(0, 4, n)), random.uniform(0.5, 2, n)
    short, plain = _no_interpolation(precision), _interpolation(ln_compute, precision, np.arange(n))
    rows = random.normal(size=(2, n))
    np.testing.assert_allclose(short.sums(rows), plain.sums(rows), rtol=1e-12)
    for name in ("identity_k", "ends_k", "neighbours_k"):
        for got, want in zip(getattr(short, name), getattr(plain, name), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


def test_the_sigmoid_is_the_logistic_function_to_both_ends() -> None:
    x = np.linspace(-40.0, 40.0, 801)
    got = gain_share(cf.Family.SIGMOID, x, np.float64(0.0), np.log(2.0))
    np.testing.assert_allclose(got, 0.5 + 0.5 * np.tanh(x), atol=5e-16)
    far = gain_share(cf.Family.SIGMOID, np.array([-np.inf, -1e4, 1e4]), np.float64(0.0), np.log(2.0))
    assert far.tolist() == [0.0, 0.0, 1.0]


def test_the_first_points_are_those_points_whatever_the_scale() -> None:
    curve = cf.Curve([1, 2, 3], [-0.3, 0.1, 0.7], samples=5, recipe="a", scale=cf.SIGNED_SCALE)
    head = curve.head(2)
    np.testing.assert_array_equal(head.reward, curve.reward[:2])
    assert (len(head), head.recipe, head.scale) == (2, ("a", "a"), cf.SIGNED_SCALE)
    with pytest.raises(cf.ShapeError, match="the first 0 of 3"):
        curve.head(0)


def test_freed_memory_is_kept_where_the_allocator_can() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
