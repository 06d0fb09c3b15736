"""Pods with a user's init containers, as the operator sees them."""

from __future__ import annotations

import pytest

from operator_tests.builders import container, pod
from scalerl_api.process import BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE, STEPS_LOST_EXIT_CODE
from scalerl_lifecycle.lifecycle_types import ContainerExit
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.pod_views import pod_view


@pytest.mark.parametrize("code", [1, BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE, STEPS_LOST_EXIT_CODE])
def test_exit_codes_of_init_containers_mean_nothing(code: int) -> None:
    """They are a user's programs: many exit with 2 after a wrong option."""
    failed = container({"terminated": {"exitCode": code, "message": "no such bucket"}}) | {"name": "fetch"}
    waiting = container({"waiting": {"reason": "PodInitializing"}})
    view = pod_view(pod("p", Role.TRAINER, waiting, initContainerStatuses=[failed], phase="Failed"))
    assert view.exits == (ContainerExit(1, "init container fetch: no such bucket"),)
    assert view.bad_input is None
    assert not view.steps_lost


def test_init_containers_that_have_ended_or_run_do_not_hide_the_roles() -> None:
    done = container({"terminated": {"exitCode": 0}}, ready=True, started=False)
    running = container({"running": {}}, ready=True, started=True)
    assert pod_view(pod("p", Role.GENERATOR, running, initContainerStatuses=[done])).started
    waiting = container({"waiting": {"reason": "PodInitializing"}})
    assert pod_view(pod("p", Role.GENERATOR, waiting)).creating
    assert not pod_view(pod("p", Role.GENERATOR, waiting, initContainerStatuses=[running])).creating, (
        "an init container runs"
    )
