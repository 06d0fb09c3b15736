"""Which refused publishes end the trainer."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl_api import wire
from scalerl_api.trainer_spec import TrainerSpec
from scalerl_trainer.checkpoints import when_to_save
from scalerl_trainer.checkpoints.write import TIMINGS
from scalerl_trainer.errors import PublishRefusedError
from scalerl_trainer.leader import Leader
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.publish import probe
from scalerl_trainer.publish.probe import Measured
from scalerl_trainer.publish.publisher import Outcome
from scalerl_trainer.publishes import MAX_EQUAL_PUBLISH_FAILURES

MEMBER = wire.Member(member_id="new/1", name="new", control_url="http://new", weight_version=-1)
STATS = {"publish_seconds": 0.1} | {
    f"publish_{phase}_seconds": 0.0 for phase in ("pause", "transfer", "load", "resume")
}


def publishing(
    monkeypatch: pytest.MonkeyPatch,
    members: list[wire.Member],
    answers: dict[str, float],
    *,
    holders: int = 0,
    outcome: Outcome | None = None,
) -> tuple[Any, list[tuple[Any, ...]]]:
    """A leader at version 5, and the publishes that it commits.

    Args:
        answers: KL by id of the members that answer a probe.
        outcome: of the transfer; by default all members get the version.
    """
    commits: list[tuple[Any, ...]] = []
    permit = wire.PublishPermit(ready=True, members=members, holders=holders)
    coordinator = SimpleNamespace(
        publish_begin=lambda version, wait: permit, publish_commit=lambda *message: commits.append(message)
    )
    spec = SimpleNamespace(
        autoscaling=SimpleNamespace(mode="Off"),
        model=SimpleNamespace(dtype="float32"),
        probe_limit=1e-6,
        trainer=TrainerSpec(),
    )
    worker = SimpleNamespace(
        spec=spec,
        coordinator=coordinator,
        version=5,
        probes=[SimpleNamespace(sequence=None)],
        engine=SimpleNamespace(
            weights=SimpleNamespace(checkpoint_shapes=dict),
            start=None,
            device=torch.device("cpu"),
            logprobs=lambda *_, **__: SimpleNamespace(per_sequence=lambda: [torch.zeros(64)]),
        ),
        send=lambda command: None,
        stop=threading.Event(),
        metrics=Metrics(),
        reads_beside=True,
    )
    done = outcome or Outcome(5, [m.member_id for m in members], [], "", STATS)
    publisher = SimpleNamespace(publish=lambda *_: done)

    def measured(_: Any, probed: list[wire.Member], *__: Any) -> Measured:
        known = {m.member_id: answers[m.member_id] for m in probed if m.member_id in answers}
        return Measured(
            {"probe_kl": 3.0}, {i: torch.full((64,), kl, dtype=torch.float64) for i, kl in known.items()}
        )

    monkeypatch.setattr(probe, "probe", measured)
    leader: Any = Leader(worker, publisher, None, SimpleNamespace(), None)  # type: ignore[arg-type]
    leader._checkpoints.save_last = lambda: ""
    return leader, commits


def publish(leader: Any) -> None:
    leader._publishes.publish()
    leader._publishes.finish_publish()
    leader._publishes.check_publish()


@pytest.mark.parametrize(("holders", "ends"), [(0, True), (1, False)])
def test_generator_that_joins_and_disagrees_ends_no_run_of_others(
    monkeypatch: pytest.MonkeyPatch, holders: int, ends: bool
) -> None:
    """As after a restart of the trainer, whose generators hold the version: only the one that joins is probed."""
    leader, commits = publishing(monkeypatch, [MEMBER], {"new/1": 3.0}, holders=holders)
    with pytest.raises(PublishRefusedError, match="KL of new 3 ") if ends else contextlib.nullcontext():
        publish(leader)
    ((_, held, failed, _, refused, problem, _),) = commits
    assert (held, failed, refused) == ([], [], ["new/1"])
    assert "KL of new 3 nats per token" in problem


@pytest.mark.parametrize("publishes", [1, 2, 3])
def test_probe_without_an_answer_is_no_evidence(monkeypatch: pytest.MonkeyPatch, publishes: int) -> None:
    """One of two generators disagrees, the other is silent: neither gets work, and the weights are sent again."""
    other = wire.Member(member_id="old/1", name="old", control_url="http://old", weight_version=4)
    leader, commits = publishing(monkeypatch, [MEMBER, other], {"new/1": 3.0})
    for earlier in range(publishes):
        ends = earlier + 1 == MAX_EQUAL_PUBLISH_FAILURES
        with (
            pytest.raises(PublishRefusedError, match=r"did not answer.* 3 publishes in a row")
            if ends
            else contextlib.nullcontext()
        ):
            publish(leader)
        _, held, failed, _, refused, problem, _ = commits[-1]
        assert (held, failed, refused) == ([], ["old/1"], ["new/1"])
        assert problem.endswith("; 1 did not answer")


def test_silent_member_that_is_absent_from_the_next_publish_is_no_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was removed, and hangs: it cannot register again. The one that disagrees is alone."""
    members = [MEMBER, wire.Member(member_id="old/1", name="old", control_url="http://old", weight_version=4)]
    leader, commits = publishing(monkeypatch, members, {"new/1": 3.0})
    publish(leader)
    del members[1]
    leader._publishes._publisher.publish = lambda *_: Outcome(5, ["new/1"], [], "", STATS)
    publish(leader)
    with pytest.raises(PublishRefusedError, match=r"did not answer.* 3 publishes in a row"):
        publish(leader)
    assert [commit[4] for commit in commits] == [["new/1"]] * 3


def test_all_that_disagree_after_silence_end_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = wire.Member(member_id="old/1", name="old", control_url="http://old", weight_version=4)
    answers = {"new/1": 3.0}
    leader, _ = publishing(monkeypatch, [MEMBER, other], answers)
    publish(leader)
    answers["old/1"] = 3.0
    with pytest.raises(PublishRefusedError, match=r"KL of new 3, old 3|KL of old 3, new 3"):
        publish(leader)


def test_member_that_answers_after_silence_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    other = wire.Member(member_id="old/1", name="old", control_url="http://old", weight_version=4)
    answers = {"new/1": 3.0}
    leader, commits = publishing(monkeypatch, [MEMBER, other], answers)
    publish(leader)
    answers["old/1"] = 0.0
    publish(leader)
    _, held, failed, _, refused, _, _ = commits[-1]
    assert (held, failed, refused) == (["old/1"], [], ["new/1"])
    assert leader._publishes._publish_failures == []
    answers["old/1"] = 3.0
    leader._worker.version += 1
    with pytest.raises(PublishRefusedError, match=r"KL of new 3, old 3|KL of old 3, new 3"):
        publish(leader)


def test_equal_failures_after_weights_were_held_are_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = publishing(monkeypatch, [MEMBER], {}, outcome=Outcome(5, [], ["new/1"], "no route", STATS))
    for _ in range(5):
        publish(leader)
    assert leader._publishes._publish_failures == []


@pytest.mark.parametrize(
    ("failed", "kept", "slow", "ends"),
    [
        ([], [], False, False),
        (["new/1"], [], True, False),
        ([], ["new/1"], True, False),
        (["new/1"], [], False, True),
        ([], ["new/1"], False, True),
    ],
)
def test_a_full_volume_or_a_slow_one_ends_no_run(
    failed: list[str], kept: list[str], slow: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No generator has weights yet, and each publish has the same problem."""
    outcome = Outcome(0, [], failed, "a problem", STATS, kept, slow)
    leader, _ = publishing(monkeypatch, [MEMBER], {}, outcome=outcome)
    with pytest.raises(PublishRefusedError) if ends else contextlib.nullcontext():
        for _ in range(4):
            leader._worker.version = 0
            publish(leader)


def test_stop_of_another_rank_ends_a_call_while_the_coordinators_volume_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, _ = publishing(monkeypatch, [MEMBER], {})
    leader._worker.sync = lambda: (False, False)
    leader._coordinator.while_full()
    assert not leader._worker.stop.is_set()
    leader._worker.sync = lambda: (True, False)
    leader._coordinator.while_full()
    assert leader._worker.stop.is_set()


def saving(*, own_directory: bool) -> tuple[Any, Any, list[Any]]:
    """A leader whose checkpoint of version 4 is on disk and that of version 2 copied; its uploader; and what the coordinator
    receives."""
    reported: list[Any] = []
    coordinator = SimpleNamespace(
        checkpoint_commit=lambda step, kept, retry: reported.append((step, kept)),
        checkpoint_failed=lambda version, reason, holding: reported.append((version, reason, holding)),
        next=lambda version, wait, uploads: None,
    )
    uploader = SimpleNamespace(uploaded=2, kept=[2], busy=True, problem="")
    saved = SimpleNamespace(step=4, kept_steps=[2, 4], error=None)
    checkpointer = SimpleNamespace(
        uploader=uploader,
        pending=True,
        finish=lambda: saved,
        committed_step=4,
        volume=lambda: None,
        timings=TIMINGS,
    )
    worker = SimpleNamespace(
        engine=SimpleNamespace(device=torch.device("cpu")),
        spec=SimpleNamespace(autoscaling=SimpleNamespace(mode="Off"), probe_limit=1e-6),
        coordinator=coordinator,
        version=4,
        checkpointer=checkpointer,
        send=lambda command: None,
        stop=threading.Event(),
        metrics=Metrics(),
        sync=lambda: (False, False),
    )
    leader: Any = Leader(
        worker,
        None,
        None,
        SimpleNamespace(),
        None,
        own_directory=own_directory,  # type: ignore[arg-type]
    )
    return leader, uploader, reported


def copy_done(uploader: Any) -> None:
    uploader.uploaded, uploader.kept, uploader.busy = 4, [2, 4], False


def test_checkpoint_in_a_directory_that_ends_with_the_pod_counts_once_it_is_copied() -> None:
    """The coordinator must keep its journal from the newest copy on."""
    leader, uploader, reported = saving(own_directory=True)
    uploader.uploaded, uploader.kept = -1, []
    leader._checkpoints.finish_checkpoint()
    assert reported == []
    uploader.uploaded, uploader.kept = 2, [2]
    leader._checkpoints._commit()
    assert reported == [(2, [2])]
    leader._checkpoints.finish_checkpoint()
    assert reported == [(2, [2])], "reported once"
    copy_done(uploader)
    leader._checkpoints.sync_and_check_stop()
    assert reported == [(2, [2]), (4, [2, 4])]

    leader, _, reported = saving(own_directory=False)
    leader._checkpoints.finish_checkpoint()
    assert reported == [(4, [2, 4])]


def test_last_checkpoint_is_held_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, uploader, reported = saving(own_directory=True)
    leader._worker.checkpointer.pending = False
    seconds = iter(range(0, 100_000, 20))
    monkeypatch.setattr(when_to_save.time, "monotonic", lambda: float(next(seconds)))
    uploader.problem = "403 Forbidden"

    def wait(_: float) -> None:
        if reported.count((4, "403 Forbidden", True)) == 200:  # more than an hour
            copy_done(uploader)

    monkeypatch.setattr(when_to_save.time, "sleep", wait)
    assert leader._checkpoints.finish_upload() == ""
    assert reported[-1] == (4, [2, 4])


def test_stop_ends_the_wait_for_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _, reported = saving(own_directory=True)
    leader._worker.checkpointer.pending = False
    leader._worker.sync = lambda: (True, False)
    seconds = iter(range(0, 100_000, 20))
    monkeypatch.setattr(when_to_save.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(when_to_save.time, "sleep", lambda _: None)
    lost = leader._checkpoints.finish_upload()
    assert lost.startswith("checkpoint 4 could not be copied, all updates since version 2 are lost")
    assert reported == [(2, [2])]


def test_update_does_not_wait_for_a_publish_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail before it has read the weights. The error is that of the publish, at the next report."""
    leader, _ = publishing(monkeypatch, [MEMBER], {})

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    leader._publishes._publisher.publish = fail
    leader._publishes.publish()
    leader._worker.reading.result(60)
    with pytest.raises(RuntimeError, match="the device is lost"):
        leader._publishes.finish_publish()
