"""Verdicts: what a verifier returns, checked in one place."""

import math
from typing import Any

import pytest

from scalerl_tasks import Verdict, VerifierConfig, VerifierError, open_verifier
from scalerl_tasks.verdict import as_verdict, declared_parts


class Declares:
    name = "mine"

    def __init__(self, *part_names: Any) -> None:
        self.part_names = part_names


@pytest.mark.parametrize(
    ("found", "names", "verdict"),
    [
        (True, (), Verdict(1.0)),
        (0, (), Verdict(0.0)),
        (0.25, (), Verdict(0.25)),
        (Verdict(1, {"b": 2, "a": -1.5}), ("a", "b"), Verdict(1.0, {"a": -1.5, "b": 2.0})),
    ],
)
def test_as_verdict(found: Any, names: tuple[str, ...], verdict: Verdict) -> None:
    made = as_verdict(found, names)
    assert made == verdict
    assert list(made.parts) == list(names)


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.01, 1.01])
def test_as_verdict_refuses_score(score: float) -> None:
    for found in (score, Verdict(score)):
        with pytest.raises(ValueError, match=r"which is not in \[0, 1\]"):
            as_verdict(found, ())


@pytest.mark.parametrize("parts", [{}, {"a": 1.0, "b": 1.0}, {"b": 1.0}, {"a": math.nan}, {"a": -math.inf}])
def test_as_verdict_refuses_parts(parts: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="part"):
        as_verdict(Verdict(1.0, parts), ("a",))


@pytest.mark.parametrize(
    "names", [("A",), ("",), ("a b",), (1,), ("a", "a"), tuple(f"p{i}" for i in range(17))]
)
def test_declared_parts_refuses(names: tuple[Any, ...]) -> None:
    with pytest.raises(VerifierError, match="mine"):
        declared_parts(Declares(*names))


def test_verifier_without_part_names_declares_none() -> None:
    assert declared_parts(open_verifier(VerifierConfig("exact"))) == ()
