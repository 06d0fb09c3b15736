"""Publishing to real processes over real gloo groups, some of which die on purpose."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checksum_vectors import CHECKSUM_VECTORS, vector_payload
from free_port import full_port
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl_api import wire
from scalerl_api.spec import RunSpec
from scalerl_api.weight_backends import WEIGHT_BACKENDS
from scalerl_api.weight_group import first_operations, new_process_group
from scalerl_api.weight_layout import (
    check_trailer,
    checksum,
    lay_out,
    tensor_bytes,
    tensor_checksum,
)
from scalerl_trainer.publish.actor_control import ActorControl, Answer, Calls
from scalerl_trainer.publish.group_publisher import GroupPublisher, PublishSettings
from scalerl_trainer.publish.make_publisher import collective_timeout_seconds, publish_settings
from scalerl_trainer.publish.probe import Measured, ProbeSequence, probe
from scalerl_trainer.publish.published_weights import SourceError, WeightSource, fill, tensor_spec
from scalerl_trainer.publish.sender_group import GroupError, Store, open_group

TOKEN = "secret"


def sample_weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (67, 8), "layer.0.w": (33, 9), "layer.0.norm": (9,), "scale": (), "head": (5, 7, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def as_weights(tensors: dict[str, torch.Tensor], streams: list[int] | None = None) -> WeightSource:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()
        if streams is not None:
            streams.append(len(tensors))  # only when read to its end

    return WeightSource([tensor_spec(n, t) for n, t in tensors.items()], stream)


# --- buckets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKSUM_VECTORS)
def test_checksum_matches_api(name: str) -> None:
    payload = (
        torch.frombuffer(bytearray(vector_payload(name)) or bytearray(), dtype=torch.uint8)
        if name != "empty"
        else torch.empty(0, dtype=torch.uint8)
    )
    assert tensor_checksum(torch, payload) == CHECKSUM_VECTORS[name]


class Operators(TorchDispatchMode):
    """Names of all torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class AllocatedBytes(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("words", [2, (1 << 14) - 2, 1 << 14, (5 << 14) + 4])
def test_checksum_uses_no_integer_dot_product(words: int) -> None:
    generator = torch.Generator().manual_seed(words)
    payload = torch.randint(0, 256, (8 * words,), dtype=torch.uint8, generator=generator)
    with Operators() as asked:
        found = tensor_checksum(torch, payload)
    assert found == checksum(payload.numpy().tobytes())
    # Matrix and dot products of int64 are "not implemented for 'Long'" there; a publish by NCCL sums on the GPU.
    assert not {"dot", "vdot", "mv", "mm", "addmm", "addmv", "bmm"} & set(asked.names)
    assert {"sum", "mul"} <= set(asked.names)


def test_checksum_of_a_large_bucket_takes_no_more_operations() -> None:
    asked = [Operators(), Operators()]
    for operators, words in zip(asked, (1 << 14, (9 << 18) + 6), strict=True):
        payload = torch.zeros(8 * words, dtype=torch.uint8)
        with operators:
            tensor_checksum(torch, payload)
    assert asked[0].names == asked[1].names


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]), min_size=12, max_size=12),
    bucket_bytes=st.integers(1, 600),
)
def test_buckets_round_trip(shapes: list[list[int]], dtypes: list[str], bucket_bytes: int) -> None:
    tensors = {
        f"t{i}": torch.from_numpy(np.random.default_rng(i).integers(0, 100, shape)).to(
            getattr(torch, dtypes[i])
        )
        for i, shape in enumerate(shapes)
    }
    buckets = lay_out([tensor_spec(n, t) for n, t in tensors.items()], bucket_bytes)
    stream = iter(tensors.items())
    dirty = torch.full((max(b.total_bytes for b in buckets),), 0xAB, dtype=torch.uint8)
    for bucket in buckets:
        sent = fill(bucket, 7, stream, dirty)
        assert sent.numel() == bucket.total_bytes
        payload, trailer = sent[: bucket.payload_bytes], sent[bucket.payload_bytes :]
        sums = checksum(payload.numpy().tobytes())
        check_trailer(trailer.view(torch.int64).tolist(), 7, bucket.index, sums)
        for slot in bucket.slots:
            flat = payload[slot.offset : slot.offset + tensor_bytes(slot.tensor)]
            got = flat.view(getattr(torch, slot.tensor.dtype)).view(slot.tensor.shape)
            assert torch.equal(got, tensors[slot.tensor.name])
    assert next(stream, None) is None


def test_fill_wrong_stream_raises() -> None:
    tensors = sample_weights()
    (bucket,) = lay_out([tensor_spec(n, t) for n, t in tensors.items()], 1 << 20)
    buffer = torch.empty(bucket.total_bytes, dtype=torch.uint8)
    short = iter(list(tensors.items())[:-1])
    with pytest.raises(SourceError, match="ended before 'head'"):
        fill(bucket, 0, short, buffer)
    other = iter((n, t.float()) for n, t in tensors.items())
    with pytest.raises(SourceError, match="float32"):
        fill(bucket, 0, other, buffer)


# --- the protocol ----------------------------------------------------------------------------------------


class FakeActors:
    def __init__(self, processes: Any, root: Path) -> None:
        self._processes, self._root = processes, root
        self.processes: dict[str, Any] = {}

    def start(self, *faults: list[dict[str, Any]]) -> list[wire.Member]:
        """One actor for each list of faults."""
        names = [f"generator-{len(self.processes) + i}" for i in range(len(faults))]
        for name, fault in zip(names, faults, strict=True):
            (self._root / name).mkdir()
            self.processes[name] = self._processes.run(
                "actor_process.py", ACTOR={"directory": self._root / name, "token": TOKEN, "faults": fault}
            )
        members = []
        for name in names:
            port = self._root / name / "port"
            deadline = time.monotonic() + 120
            while not port.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            members.append(
                wire.Member(
                    member_id=name,
                    name=name,
                    control_url=f"http://127.0.0.1:{port.read_text()}",
                    weight_version=-1,
                )
            )
        return members

    def took(self, name: str, version: int) -> dict[str, torch.Tensor] | None:
        path = self._root / name / f"v{version}.pt"
        return torch.load(path) if path.exists() else None

    def holds(self, name: str, version: int, tensors: dict[str, torch.Tensor]) -> bool:
        taken = self.took(name, version)
        return (
            taken is not None
            and taken.keys() == tensors.keys()
            and all(
                torch.equal(
                    taken[n].view(torch.uint8) if t.dim() else taken[n], t.view(torch.uint8) if t.dim() else t
                )
                for n, t in tensors.items()
            )
        )


@pytest.fixture
def actors(processes: Any, tmp_path: Path) -> FakeActors:
    return FakeActors(processes, tmp_path)


class ShortLimits(GroupPublisher):
    """Over gloo, members wait for a lost one until their limit: it is two seconds in the first ``short_rounds`` of several members, and
    else one that a slow machine keeps."""

    short_rounds = 99
    max_seconds = 300.0

    def _attempt(
        self, version: int, weights: Any, buckets: Any, members: list[wire.Member], *rest: Any
    ) -> Any:
        short = len(members) > 1 and self.short_rounds > 0
        self.short_rounds -= short
        self._settings = replace(self._settings, timeout_seconds=2.0 if short else 60.0)
        return super()._attempt(version, weights, buckets, members, *rest)


@pytest.fixture
def make_publisher() -> Iterator[Callable[..., GroupPublisher]]:
    made: list[GroupPublisher] = []
    control = ActorControl(TOKEN)

    def make(
        timeout_seconds: float = 60.0, bucket_bytes: int = 512, kind: type[GroupPublisher] = GroupPublisher
    ) -> GroupPublisher:
        settings = PublishSettings(
            host="127.0.0.1",
            backend="gloo",
            bucket_bytes=bucket_bytes,
            timeout_seconds=timeout_seconds,
            answer_grace_seconds=60.0,
        )
        made.append(kind(settings, control))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
    control.close()


def test_publish_updates_all_members(actors: FakeActors, make_publisher: Any) -> None:
    members = actors.start([], [])
    publisher = make_publisher()
    for version in (0, 1, 2):
        tensors = sample_weights(version)
        outcome = publisher.publish(version, as_weights(tensors), members)
        assert sorted(outcome.updated) == ["generator-0", "generator-1"]
        assert outcome.failed == []
        assert outcome.stats["publish_rounds"] == 1
        for member in members:
            assert actors.holds(member.name, version, tensors)
    assert outcome.stats["publish_open_seconds"] == 0, "the same members keep their group"


NCCL_BUCKET = WEIGHT_BACKENDS["NCCL"].own_bucket_bytes


def test_publish_with_the_buckets_of_nccl(
    actors: FakeActors, make_publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are of the model's size, not of a bucket's."""
    backend = replace(WEIGHT_BACKENDS["NCCL"], group="gloo")
    monkeypatch.setitem(WEIGHT_BACKENDS, "NCCL", backend)  # type: ignore[index]
    spec = RunSpec.model_validate(
        {
            "model": {"path": "/m"},
            "task": {"jsonl": {"path": "/x"}, "verifier": {"name": "exact"}},
            "generator": {"devices": 1, "deviceMemory": "80Gi"},
            "trainer": {"devices": 1},
            "budget": {"maxSteps": 1},
        }
    )
    made = publish_settings(spec, "127.0.0.1", torch.device("cpu"))
    assert (made.backend, made.bucket_bytes) == ("gloo", NCCL_BUCKET)
    (member,) = actors.start([])
    publisher, tensors = make_publisher(bucket_bytes=made.bucket_bytes), sample_weights()
    with AllocatedBytes() as allocated:
        assert publisher.publish(0, as_weights(tensors), [member]).updated == ["generator-0"]
    assert actors.holds("generator-0", 0, tensors)
    assert allocated.largest < 1 << 20


def test_publish_with_a_tensor_above_a_bucket_and_a_short_last_one(
    actors: FakeActors, make_publisher: Any
) -> None:
    tensors, bucket_bytes = sample_weights(), 600
    buckets = lay_out([tensor_spec(n, t) for n, t in tensors.items()], bucket_bytes)
    assert len(buckets) > 2
    assert buckets[0].payload_bytes > bucket_bytes > buckets[-1].payload_bytes
    (member,) = actors.start([])
    outcome = make_publisher(bucket_bytes=bucket_bytes).publish(0, as_weights(tensors), [member])
    assert outcome.updated == ["generator-0"]
    assert actors.holds("generator-0", 0, tensors)


def test_publish_new_member_opens_new_group(actors: FakeActors, make_publisher: Any) -> None:
    (first,) = actors.start([])
    publisher = make_publisher()
    publisher.publish(0, as_weights(sample_weights(0)), [first])
    (second,) = actors.start([])
    tensors = sample_weights(1)
    outcome = publisher.publish(1, as_weights(tensors), [first, second])
    assert sorted(outcome.updated) == ["generator-0", "generator-1"]
    assert outcome.stats["publish_open_seconds"] > 0
    assert actors.holds("generator-1", 1, tensors)


def test_publish_without_members(make_publisher: Any) -> None:
    outcome = make_publisher().publish(3, as_weights(sample_weights()), [])
    assert (outcome.updated, outcome.failed) == ([], [])


@pytest.mark.parametrize(("bucket", "place"), [(0, 0), (1, 1), (0, 2), (2, 2)])
def test_publish_receiver_killed_in_broadcast_fails_alone(
    actors: FakeActors, make_publisher: Any, bucket: int, place: int
) -> None:
    faults: list[list[dict[str, Any]]] = [[], [], []]
    faults[place] = [{"at": "receive", "how": "kill", "bucket": bucket}]
    members = actors.start(*faults)
    publisher = make_publisher(timeout_seconds=120.0)
    streams: list[int] = []
    tensors = sample_weights()
    started = time.monotonic()
    outcome = publisher.publish(4, as_weights(tensors, streams), members)
    assert time.monotonic() - started < 100
    assert outcome.failed == [f"generator-{place}"]
    others = [m for i, m in enumerate(members) if i != place]
    assert sorted(outcome.updated) == [m.member_id for m in others]
    assert all(actors.holds(m.name, 4, tensors) for m in others)
    assert len(streams) >= outcome.stats["publish_rounds"], "each stream is read to its end"
    # and the next one succeeds with the others
    assert sorted(publisher.publish(5, as_weights(tensors), others).updated) == sorted(outcome.updated)


@pytest.mark.parametrize("at", ["join", "allreduce"])
def test_publish_receiver_killed_while_joining_fails_alone(
    actors: FakeActors, make_publisher: Any, at: str
) -> None:
    members = actors.start([{"at": at, "how": "kill"}], [])
    streams: list[int] = []
    outcome = make_publisher().publish(0, as_weights(sample_weights(), streams), members)
    assert (outcome.updated, outcome.failed) == (["generator-1"], ["generator-0"])
    assert outcome.stats["publish_rounds"] == 2
    assert len(streams) == 1, "nothing is gathered for a group that is not open"


def test_publish_unreachable_member_fails_alone(actors: FakeActors, make_publisher: Any) -> None:
    (alive,) = actors.start([])
    gone = wire.Member(
        member_id="generator-9", name="generator-9", control_url="http://127.0.0.1:9", weight_version=-1
    )
    outcome = make_publisher().publish(0, as_weights(sample_weights()), [gone, alive])
    assert (outcome.updated, outcome.failed) == (["generator-0"], ["generator-9"])


def test_request_that_gets_no_connection_names_that_limit() -> None:
    control = ActorControl("secret", connect_seconds=0.2)
    with full_port() as port:
        member = wire.Member(
            member_id="m", name="generator-0", control_url=f"http://127.0.0.1:{port}", weight_version=-1
        )
        answers = control.start([member], "/v1/weights/join", {"m": wire.Ack()}, 120.0).wait()
    assert answers["m"].error.endswith("/v1/weights/join: no connection in 0.2 s")
    control.close()


def test_publish_dead_actor_fails_at_once(actors: FakeActors, make_publisher: Any) -> None:
    """Its server's end of the group is open and reads nothing: the operation in progress ends at its timeout only."""
    (member,) = actors.start([])
    publisher = make_publisher(timeout_seconds=120.0)
    publisher.publish(0, as_weights(sample_weights(0)), [member])
    gone = msgspec.structs.replace(member, control_url="http://127.0.0.1:9")
    started = time.monotonic()
    outcome = publisher.publish(1, as_weights(sample_weights(1)), [gone])
    assert (outcome.updated, outcome.failed) == ([], ["generator-0"])
    assert time.monotonic() - started < 100


@pytest.mark.parametrize("how", ["not-ready", "update-failed"])
@pytest.mark.parametrize("at", ["join", "receive"])
def test_publish_refusing_member_fails_alone(
    actors: FakeActors, make_publisher: Any, at: str, how: str
) -> None:
    members = actors.start([], [{"at": at, "how": how}])
    started = time.monotonic()
    tensors = sample_weights()
    outcome = make_publisher(kind=ShortLimits).publish(0, as_weights(tensors), members)
    assert (outcome.updated, outcome.failed) == (["generator-0"], ["generator-1"])
    assert actors.holds("generator-0", 0, tensors)
    assert time.monotonic() - started < 60


def test_publish_retries_member(actors: FakeActors, make_publisher: Any) -> None:
    members = actors.start([], [{"at": "receive", "how": "update-failed", "bucket": 1, "times": 1}])
    publisher = make_publisher(kind=ShortLimits)
    publisher.short_rounds = 1
    outcome = publisher.publish(0, as_weights(sample_weights()), members)
    assert sorted(outcome.updated) == ["generator-0", "generator-1"]
    assert outcome.stats["publish_rounds"] == 2


@pytest.mark.parametrize("at", ["join", "allreduce", "receive"])
def test_publish_frozen_member_times_out(
    actors: FakeActors, make_publisher: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    wait = Calls.wait

    def wait_for_others(calls: Calls) -> dict[str, Answer]:
        """The limit of the frozen one is over when all others have answered."""
        until = time.monotonic() + 120
        while calls.asked - calls.answers.keys() - {"generator-0"}:
            assert time.monotonic() < until
            time.sleep(0.01)
            calls.collect()
        calls.deadline = time.monotonic()
        return wait(calls)

    monkeypatch.setattr(Calls, "wait", wait_for_others)
    members = actors.start([{"at": at, "how": "freeze", "bucket": 1 if at == "receive" else 0}], [])
    started = time.monotonic()
    tensors = sample_weights()
    publisher = make_publisher(kind=ShortLimits, bucket_bytes=256)
    outcome = publisher.publish(0, as_weights(tensors), members)
    assert (outcome.updated, outcome.failed) == (["generator-1"], ["generator-0"])
    assert actors.holds("generator-1", 0, tensors)
    assert time.monotonic() - started < 60
    os.kill(actors.processes["generator-0"].pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("backend", "timeout_seconds", "limit"),
    [("Auto", 120, 600), ("Auto", 3600, 14_460), ("Files", 120, 1140)],
)
def test_collective_timeout_exceeds_publish(backend: str, timeout_seconds: int, limit: float) -> None:
    """An update waits on each rank until a publish, with all its attempts, has read the weights: three timeouts, and one more for a
    member that is lost when the last begins. A write to files that makes progress may take eight."""
    spec = RunSpec.model_validate(
        {
            "model": {"hub": {"name": "a/model"}},
            "task": {"jsonl": {"path": "/x"}, "verifier": {"name": "exact"}},
            "trainer": {"zeroStage": 3},
            "weightSync": {"backend": backend, "timeoutSeconds": timeout_seconds},
            "budget": {"maxSteps": 1},
        }
    )
    assert collective_timeout_seconds(spec) == limit


def join_of(backend: Any) -> wire.GroupJoin:
    return wire.GroupJoin(
        epoch=1, store_host="", store_port=1, rank=1, world_size=3, backend=backend, timeout_seconds=1.0
    )


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_connections_of_broadcasts_over_nccl_open_with_the_group(backend: str) -> None:
    """NCCL opens them in the first broadcast, and waits for all ranks on the host: it is not that of the first bucket."""
    done: list[str] = []

    def operation(name: str) -> Any:
        def start(tensors: list[torch.Tensor], *_: Any) -> str:
            tensors[0].fill_(3)
            return name

        return start

    group = SimpleNamespace(allreduce=operation("allreduce"), broadcast=operation("broadcast"))
    first_operations(torch.distributed, group, join_of(backend), torch.ones(1), done.append)
    assert done == (["allreduce", "broadcast"] if backend == "nccl" else ["allreduce"])


def test_group_over_nccl_has_no_stream_of_the_buckets_or_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
            made.append(options)

    c10d = torch.distributed
    monkeypatch.setattr(c10d, "TCPStore", lambda *_, **__: c10d.HashStore())
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # restored after the test
    new_process_group(c10d, join_of("nccl"), 1, "")
    assert [options.is_high_priority_stream for options in made] == [True]


def test_check_ends_a_wait_for_gloo_and_a_later_wait_continues() -> None:
    """A wait of gloo's that times out leaves its operation in progress."""
    store, peers = Store("127.0.0.1", 60.0), list[Any]()
    c10d: Any = torch.distributed
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]

    def join() -> None:
        client = c10d.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        peers.append(c10d.ProcessGroupGloo(c10d.PrefixStore("scalerl-1", client), 1, 2, options))
        peers[0].allreduce([torch.ones(1)]).wait()

    joining = threading.Thread(target=join)
    joining.start()
    group = open_group(store.join(1, "gloo", 2, 60.0), store, torch.device("cpu"), lambda: None)
    joining.join()
    sent = torch.full((32 << 20,), 7, dtype=torch.uint8)  # more than sockets buffer
    work, checks = group.start_broadcast(sent, 60.0), iter([None, None, GroupError("a member is lost")])

    def check() -> None:
        if error := next(checks):
            raise error

    started = time.monotonic()
    with pytest.raises(GroupError, match="a member is lost"):
        group.wait(work, started + 60, check)
    with pytest.raises(GroupError, match="timed out"):
        group.wait(work, time.monotonic() + 0.1, lambda: None)
    assert time.monotonic() - started < 30
    received = torch.zeros_like(sent)
    receiving = peers[0].broadcast([received], c10d.BroadcastOptions())
    group.wait(work, time.monotonic() + 60, lambda: None)
    receiving.wait()
    group.close()
    assert torch.equal(received, sent)


def test_nccl_group_survives_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads how a group reacts to a lost peer when the group is constructed: by default it ends the process."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    found: list[str | None] = []

    class NoGpu(torch.distributed.ProcessGroupNCCL):
        def __init__(self, *_: object) -> None:
            found.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
            raise RuntimeError("no GPUs found")

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NoGpu)
    store = Store("127.0.0.1", 5.0)
    with pytest.raises(GroupError, match="no GPUs found"):
        open_group(store.join(1, "nccl", 1, 5.0), store, torch.device("cpu"), lambda: None)
    store.close()
    assert found == ["2"]  # CleanUpOnly


def test_publish_wrong_manifest_raises(actors: FakeActors, make_publisher: Any) -> None:
    members = actors.start([])
    tensors = sample_weights()
    weights = WeightSource(as_weights(tensors).manifest, lambda: iter([]))
    with pytest.raises(SourceError):
        make_publisher().publish(0, weights, members)


def test_publish_leaves_no_thread(actors: FakeActors, make_publisher: Any) -> None:
    members = actors.start([], [{"at": "receive", "how": "kill", "bucket": 1}])
    before = set(threading.enumerate())
    publisher = make_publisher()
    publisher.publish(0, as_weights(sample_weights()), members)
    publisher.close()
    deadline = time.monotonic() + 120
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, set(threading.enumerate()) - before
        time.sleep(0.05)


def test_probe_measures_the_distance(actors: FakeActors) -> None:
    (member,) = actors.start([])
    control = ActorControl(TOKEN)
    sequences = [
        ProbeSequence(np.arange(1, 9, dtype=np.int32), 3),
        ProbeSequence(np.arange(4, dtype=np.int32), 1),
    ]

    scores = [torch.full((len(s.token_ids) - s.prompt_tokens,), -5.4) for s in sequences]
    stats = probe(control, [member], 3, sequences, scores).stats
    control.close()
    ratio = torch.tensor(0.1).exp().item()
    assert stats["probe_kl"] == pytest.approx(ratio - 1 - 0.1, rel=1e-3)  # k3 of a difference of .1
    assert stats["probe_max_difference"] == pytest.approx(0.1, rel=1e-3)
    assert stats["probe_tokens"] == stats["probe_tokens_0_256"] == 8


def test_probe_failure_is_reported(actors: FakeActors) -> None:
    (member,) = actors.start([{"at": "probe", "how": "wrong-version"}])
    control = ActorControl(TOKEN)
    sequences = [ProbeSequence(np.arange(1, 9, dtype=np.int32), 3)]
    measured = probe(control, [member], 3, sequences, [torch.zeros(5)])
    control.close()
    assert (measured.stats, measured.k3_n) == ({"probe_failed": 1.0}, {})
    assert measured.above(0.0) == [], "a probe without an answer is not a disagreement"


def test_probe_of_weights_that_are_no_numbers_blames_no_generator(actors: FakeActors) -> None:
    (member,) = actors.start([])
    control = ActorControl(TOKEN)
    sequences = [ProbeSequence(np.arange(1, 9, dtype=np.int32), 3)]
    measured = probe(control, [member], 3, sequences, [torch.full((5,), torch.nan)])
    control.close()
    assert (measured.stats, measured.above(1e-6)) == ({"probe_failed": 1.0}, [])


@pytest.mark.parametrize(
    ("k3", "limit", "above"),
    [
        ([0.011] * 1000, 0.01, True),
        ([0.009] * 1000, 0.01, False),
        ([0.0001] * 960 + [5.0] * 40, 0.01, False),  # other experts for a few tokens: the plain mean is .2
        ([0.0001] * 940 + [5.0] * 60, 0.01, True),
        ([0.0] * 999 + [0.1], 1e-6, False),
        ([2e-6] * 1000, 1e-6, True),
        ([0.0] * 999 + [float("nan")], 0.01, True),
        ([float("inf")] * 60 + [0.0] * 940, 0.01, True),
        ([0.0, float("nan")], 0.01, True),
        ([], 0.01, False),
    ],
)
def test_probe_limit_is_for_the_mean_of_most_tokens(k3: list[float], limit: float, above: bool) -> None:
    measured = Measured({}, {"m": torch.tensor(k3, dtype=torch.float64)})
    assert measured.above(limit) == (["m"] if above else [])


def test_probe_compares_each_member(actors: FakeActors) -> None:
    far, near, silent, broken = actors.start(
        [{"at": "probe", "how": -9.0}],
        [],
        [{"at": "probe", "how": "wrong-version"}],
        [{"at": "probe", "how": float("nan")}],
    )
    control = ActorControl(TOKEN)
    sequences = [ProbeSequence(np.arange(1, 100, dtype=np.int32), 3)]
    members = [far, near, silent, broken]
    measured = probe(control, members, 3, sequences, [torch.full((96,), -5.5)])
    control.close()
    assert measured.k3_n.keys() == {far.member_id, near.member_id, broken.member_id}
    assert measured.above(1e-6) == [far.member_id, broken.member_id]
    assert not measured.k3_n[near.member_id].any()
    assert measured.stats["probe_max_difference"] == pytest.approx(3.5), "of the first that answered"
