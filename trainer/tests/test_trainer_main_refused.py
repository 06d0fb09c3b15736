"""Publishes with which generators compute something else, or that they cannot load: nothing is trained with them."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_run import until

from scalerl_api.process import PUBLISH_REFUSED_EXIT_CODE

pytestmark = pytest.mark.slow
REFUSED = [PUBLISH_REFUSED_EXIT_CODE] * 2


def waiting_for(run: Any) -> str:
    status = run.status()
    return status.waiting_for if status is not None else ""


def test_first_publish_that_disagrees_is_refused_before_any_lease(new_run: Any) -> None:
    """The stand-in gives all tokens one log-probability: a KL of .007, above the default limit for float32."""
    run = new_run(weightSync__probeLimit=None)
    run.start()
    assert run.wait_trainer() == REFUSED
    log = run.log("trainer-0")
    assert "PUBLISH REFUSED: after the publish of version 0, generators compute something else" in log
    assert "KL of generator-0 0.0" in log
    assert "above the limit of 1e-06, weightSync.probeLimit" in log
    assert "raise weightSync.probeLimit" in log
    status = run.status()
    assert status is not None
    assert (status.published_version, status.counts.acknowledged, status.wall_seconds) == (-1, 0, 0)
    until(lambda: "; the last publish failed: after the publish of version 0" in waiting_for(run))


def test_later_disagreement_keeps_the_trained_weights(new_run: Any) -> None:
    run = new_run(weightSync__probeLimit="3", checkpoint__everySteps=100)
    run.start_coordinator()
    run.start_generator(*({"at": "probe", "version": v, "how": -60.0} for v in (3, 4, 5, 6)))
    run.start_trainer()
    assert run.wait_trainer() == REFUSED
    (saved,) = run.checkpoints()
    assert saved in (3, 4), (
        "the weights of the refused version, or of the step that was computed beside its publish"
    )
    status = run.status()
    assert status is not None
    assert (status.step, status.published_version, status.checkpoint_version) == (saved, 2, saved)
    run.start_trainer()
    # It may train on rollouts that wait already before the generator has registered again.
    assert run.wait_trainer() == REFUSED, "published and probed again, and refused again"
    assert 3 <= run.step() == run.checkpoints()[-1] <= 6


def test_one_broken_generator_gets_no_work(new_run: Any) -> None:
    run = new_run(weightSync__probeLimit="3")
    run.start_coordinator()
    broken = run.start_generator({"at": "probe", "how": -60.0})
    good = run.start_generator()
    until(lambda: (status := run.status()) is not None and len(status.members) == 2)
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert run.step() == 6
    assert (broken / "v0.pt").exists(), "it received weights"
    assert (good / "v6.pt").exists()
    log = run.log("trainer-0")
    assert "1 of 2 probed are above the limit" in log
    assert "generator-0 cannot use version 0 and must register again" in run.log("coordinator-0")


def test_publish_that_always_fails_ends_the_run_with_its_reason(new_run: Any) -> None:
    run = new_run()
    run.start_coordinator()
    run.start_generator({"at": "receive", "how": "vLLM's TinyModel cannot load the tensor 'a.0.b'"})
    run.start_trainer()
    until(lambda: "; the last publish failed: POST http" in waiting_for(run))
    assert "cannot load the tensor 'a.0.b'" in waiting_for(run)
    assert run.wait_trainer() == REFUSED
    log = run.log("trainer-0")
    assert "PUBLISH REFUSED: 3 publishes in a row reached no generator, and none has ever held weights" in log
    assert log.count("gave up publishing version 0") == 3
    assert "cannot load the tensor 'a.0.b'" in log.splitlines()[-1]
