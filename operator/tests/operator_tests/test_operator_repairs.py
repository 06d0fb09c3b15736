"""How often what somebody else has changed is put back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from operator_tests.manifests import UID
from scalerl_operator.controller.drift import differences
from scalerl_operator.controller.owned import Place
from scalerl_operator.controller.repairs import LONGEST_REPAIR_SECONDS, Repairs

NOW = Place({"metadata": {"uid": UID, "name": "r", "namespace": "n"}}, {}, 1e9)
WHAT = ("Deployment", "r-generator")


def at(seconds: float) -> Place:
    return replace(NOW, unix_seconds=1e9 + seconds)


def test_whoever_changes_an_object_again_and_again_is_fought_ever_more_rarely() -> None:
    repairs, made = Repairs(), list[int]()
    for second in range(1500):
        if repairs.may(at(second), WHAT):
            made.append(second)
    waits = [later - earlier for earlier, later in pairwise(made)]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert repairs.may(at(1500), ("Service", "another")), "each for itself"
    quiet = made[-1] + 2 * LONGEST_REPAIR_SECONDS + 1
    assert repairs.lately(at(quiet - 1))
    assert repairs.may(at(quiet), WHAT)
    assert repairs.may(at(quiet + 2), WHAT), "after a while it begins anew"


def test_a_repair_that_is_withheld_is_looked_at_again_when_it_is_due() -> None:
    repairs = Repairs()
    assert repairs.may(at(0), WHAT)
    assert repairs.next_seconds(at(0)) is None
    assert not repairs.may(at(0.5), WHAT)
    assert repairs.next_seconds(at(0.5)) == pytest.approx(1.5)
    assert repairs.next_seconds(at(2)) is None, "if it was needed, it is done"
    assert repairs.next_seconds(at(-1e6)) is None, "a clock that was set back keeps nobody waiting"
    assert repairs.may(at(2), WHAT)
    repairs.forget(UID)
    assert not repairs.lately(at(2))


def test_what_an_apply_leaves_as_it_was_is_not_applied_again_until_more_is_different() -> None:
    wanted = {"spec": {"image": "ours:1", "replicas": 1}}
    mirrored = {"spec": {"image": "mirror/ours:1", "replicas": 1}}
    left, repairs = differences(wanted, mirrored), Repairs()
    assert not repairs.in_vain(at(0), WHAT, left)
    assert repairs.applied(at(0), WHAT, left)
    assert not repairs.applied(at(1), WHAT, left), "it is told once"
    assert repairs.in_vain(at(1), WHAT, left)
    edited = {"spec": {"image": "mirror/ours:1", "replicas": 5}}
    assert not repairs.in_vain(at(1), WHAT, differences(wanted, edited))
    another = {"spec": {"image": "mirror/ours:2", "replicas": 1}}
    assert not repairs.in_vain(at(1), WHAT, differences(wanted, another))
    assert not repairs.applied(at(2), WHAT, [])
    assert not repairs.in_vain(at(2), WHAT, left), "admission has let it be"
