from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_operator import names
from scalerl_operator.names import Names, label_value, stem

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
RUN_NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,80}[a-z0-9])?", fullmatch=True)


def every_name(run: str) -> list[str]:
    n = Names(run)
    return [
        *(n.claim, n.spec, n.token, n.curve, n.network, n.prepare, n.coordinator, n.generator, n.trainer),
        *(n.trainer_job(attempt) for attempt in (1, 99_999)),
    ]


@given(RUN_NAMES)
def test_every_name_is_a_dns_label(run: str) -> None:
    made = every_name(run)
    assert all(LABEL.fullmatch(name) for name in made), made
    assert len(set(made)) == len(made)


@given(RUN_NAMES)
def test_pods_have_room_behind_their_workloads_name(run: str) -> None:
    n = Names(run)
    assert (
        len(n.coordinator) <= 52
    )  # a StatefulSet's pods carry a label: its name, "-", ten characters of hash
    assert len(f"{n.trainer_job(99_999)}-4095") <= 63  # the hostname of the last rank


@given(RUN_NAMES)
def test_run_label_is_defined_once(run: str) -> None:
    value = label_value(run)
    assert len(value) <= 63
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", value)


@given(RUN_NAMES, RUN_NAMES)
def test_two_runs_never_share_a_name(one: str, other: str) -> None:
    if one != other:
        assert stem(one) != stem(other)
        assert label_value(one) != label_value(other)


@given(RUN_NAMES)
def test_run_named_like_shortened_name_is_distinguished(run: str) -> None:
    assert stem(stem(run)) != stem(run) or stem(run) == run
    assert label_value(label_value(run)) != label_value(run) or label_value(run) == run


@pytest.mark.parametrize(
    ("run", "made"),
    [
        ("tiny", "tiny"),
        ("math-20260401", "math-20260401"),
        ("a" * 40, "a" * 40),
        ("a" * 41, "a" * 30 + "-xc0f8bd4d"),
        ("a.b", "a-b-x2e7336dc"),
        ("7b", "run-7b-x925a7bf1"),
    ],
)
def test_valid_name_is_not_changed(run: str, made: str) -> None:
    assert stem(run) == made


def test_labels_select_only_pods_of_the_run() -> None:
    labels = names.labels("math", "uid-1", "trainer")
    assert names.selector("uid-1", "trainer").items() <= labels.items()
    assert names.selector("uid-1").items() <= labels.items()
    assert not names.selector("uid-0").items() <= labels.items()
    assert not names.selector("uid-1", "generator").items() <= labels.items()


def test_rank_0_has_another_address_in_every_attempt() -> None:
    n = Names("math")
    assert n.master("ml", 3) == "math-trainer-3-0.math-trainer.ml.svc"
    assert n.coordinator_url("ml") == "http://math-coordinator.ml.svc:8080"
