"""The coordinator as a process: a full disk, signals, bad input, and kill -9 at random moments under load."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time

import aiohttp
import pytest
import yaml
from coordinator_client import Client, ErrorAnswer, make_group

from scalerl_api import endpoints, wire
from scalerl_api.process import STEPS_LOST_EXIT_CODE


@pytest.fixture
async def serving(coordinator, client):
    """A started coordinator process with a trainer and a member that holds version 0."""
    coordinator.start()
    client.member = await client.register("g", coordinator.digest)
    await client.hello("t")
    await client.publish("t", 0)
    await client.heartbeat(client.member, 0)
    return client


async def test_process_full_disk_answers_507_and_loses_nothing(coordinator, serving):
    """The limit on the process's file size stands in for the end of the disk; the writes really fail."""
    leases = (await serving.lease(serving.member, 0, 64)).leases
    train = [lease for lease in leases if lease.split is wire.Split.TRAIN]
    await serving.push(serving.member, [make_group(train[0])])
    pid = coordinator.process.pid
    before = await serving.status()
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
    for _ in range(2):
        with pytest.raises(ErrorAnswer) as caught:
            await serving.push(serving.member, [make_group(train[1])])
        assert (caught.value.status, caught.value.error) == (507, "no-space")
    await serving.heartbeat(serving.member, 0)
    assert (await serving.status()).counts == before.counts
    async with serving.session.get(coordinator.url + endpoints.READY) as response:
        assert response.status == 503
    await asyncio.sleep(1.5)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    async with asyncio.timeout(120):
        while True:
            try:
                reply = await serving.push(serving.member, [make_group(train[1])])
                break
            except ErrorAnswer:
                await asyncio.sleep(0.1)
    assert reply.results == ["accepted"]
    assert (await serving.push(serving.member, [make_group(train[0])])).results == ["duplicate"]
    coordinator.kill()
    coordinator.start()
    assert (await serving.status()).counts.acknowledged == 4


async def test_process_sigterm_answers_polls_and_writes_snapshot(coordinator, serving):
    await serving.lease(serving.member, 0, 64)
    poll = asyncio.create_task(serving.lease(serving.member, 0, 1, wait=60))
    await asyncio.sleep(0.2)
    await serving.status()  # an answer to what was asked after the poll: the process has that, too
    started = time.monotonic()
    assert await asyncio.to_thread(coordinator.terminate) == 0
    assert time.monotonic() - started < 50
    assert (await poll).leases == []
    assert list(coordinator.paths.journal.glob("snapshot-*"))


@pytest.mark.parametrize("fault", ["yaml", "journal", "identity", "locked", "token"])
def test_process_bad_input_exits_2(coordinator, fault):
    message = {
        "yaml": "run.yaml",
        "journal": "segment-00000001, offset 0",
        "identity": "seed was 0, is 8",
        "locked": "another coordinator serves this run",
        "token": "SCALERL_TOKEN_FILE",
    }[fault]
    if fault in ("identity", "locked"):
        coordinator.start()
    if fault == "identity":
        coordinator.terminate()
        text = coordinator.paths.run_file.read_text()
        coordinator.paths.run_file.write_text(text.replace("spec:\n", "spec:\n  seed: 8\n"))
    if fault == "yaml":
        coordinator.paths.run_file.write_text("nonsense")
    if fault == "journal":
        coordinator.paths.journal.mkdir()
        (coordinator.paths.journal / "segment-00000001").write_bytes(b"x" * 100)
        (coordinator.paths.journal / "segment-00000002").write_bytes(b"")
    if fault == "token":
        coordinator.paths.token.unlink()
    first = coordinator.process
    coordinator.start(ready=False)
    assert coordinator.process.wait(120) == 2
    assert message in coordinator.log()
    assert "Traceback" not in coordinator.log()
    if fault == "locked":
        first.kill()
        first.wait(120)


async def test_process_damaged_group_exits_2(coordinator, serving):
    for lease in (await serving.lease(serving.member, 0, 64)).leases:
        await serving.push(serving.member, [make_group(lease)])
    segment = coordinator.paths.journal / "segment-00000001"
    whole = bytearray(segment.read_bytes())
    whole[whole.index(b"token_ids")] ^= 1
    segment.write_bytes(whole)
    with pytest.raises((ErrorAnswer, aiohttp.ClientError)):
        await serving.shard("t", 0)
    assert await asyncio.to_thread(coordinator.process.wait, 120) == 2
    assert "segment-00000001, offset" in coordinator.log()
    assert "Traceback" not in coordinator.log()


class Generator:
    """A client that behaves as an actor: it retries with a pause, and registers again on request."""

    def __init__(self, client: Client, name: str, digest: str, seed: int) -> None:
        self.client, self.name, self.digest = client, name, digest
        self.chance = random.Random(seed)
        self.member = ""
        self.held: dict[str, tuple[wire.Lease, wire.Group]] = {}
        self.acknowledged: dict[str, wire.Group] = {}
        self.version = -1

    async def live(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self._once()
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)
            except ErrorAnswer as answer:
                if answer.error != "unknown-member":
                    raise
                self.member = ""

    async def _once(self) -> None:
        if not self.member:
            self.member = await self.client.register(self.name, self.digest, list(self.held))
        status = await self.client.status()
        held = [m.weight_version for m in status.members if m.member_id == self.member]
        self.version = max([self.version, *held])
        answer = await self.client.lease(self.member, self.version, 3, wait=0.2)
        # Generated once, and sent again as it is: what was journaled may have been killed before it was acknowledged.
        self.held |= {
            lease.lease_id: (lease, make_group(lease, tokens=self.chance.randint(1, 16)))
            for lease in answer.leases
        }
        for lease, group in self.chance.sample(list(self.held.values()), min(4, len(self.held))):
            reply = await self.client.push(self.member, [group])
            del self.held[lease.lease_id]
            assert reply.results[0] in ("accepted", "duplicate", "late"), reply
            if reply.results[0] != "late" and lease.split is wire.Split.TRAIN:
                self.acknowledged[lease.lease_id] = group


class Trainer:
    """A trainer that retries; it stores what it trained on."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.version = 0
        self.trained: dict[int, list[tuple[int, bytes]]] = {}

    async def live(self, steps: int) -> None:
        await self._retry(lambda: self.client.hello("t"))
        while self.version < steps:
            following = await self._retry(lambda: self.client.next("t", self.version, wait=0.5))
            if following.action is wire.NextAction.PUBLISH:
                await self._publish()
            elif following.action is wire.NextAction.TRAIN:
                shard = await self._retry(lambda: self.client.shard("t", self.version))
                self.trained[self.version] = [
                    (shard.groups[s.group].slot, s.token_ids) for s in shard.sequences
                ]
                await self._retry(lambda: self.client.report("t", self.version))
                self.version += 1
                await self._publish()

    async def _publish(self) -> None:
        while not (await self._retry(lambda: self.client.publish("t", self.version, wait=0.5))).ready:
            pass

    async def _retry(self, call):
        while True:
            try:
                return await call()
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_process_random_kills_lose_nothing_acknowledged(coordinator, client):
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    chance = random.Random(seed)
    # Half the budget: the rest stays queued, to be looked for at the end.
    text = coordinator.paths.run_file.read_text()
    coordinator.paths.run_file.write_text(text.replace("maxSteps: 4", "maxSteps: 40"))
    coordinator.start()
    stop = asyncio.Event()
    generators = [Generator(client, f"g{i}", coordinator.digest, seed * 10 + i) for i in range(3)]
    trainer = Trainer(client)
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        alive = [tasks.create_task(g.live(stop)) for g in generators]
        training = tasks.create_task(trainer.live(12))
        for _ in range(4):
            await asyncio.sleep(chance.uniform(0.1, 0.8))
            coordinator.kill()
            await asyncio.to_thread(coordinator.start)
        await training
        stop.set()
        await asyncio.gather(*alive)
    coordinator.kill()
    coordinator.start()
    counts = (await client.status()).counts
    assert counts.acknowledged == counts.trained + counts.filtered + counts.queued
    acknowledged = {g.slot: g for generator in generators for g in generator.acknowledged.values()}
    assert counts.acknowledged >= 2 * len(acknowledged)
    trained = {slot for step in trainer.trained.values() for slot, _ in step}
    assert trained == set(range(48))
    for step, sequences in trainer.trained.items():
        assert {slot for slot, _ in sequences} == set(range(4 * step, 4 * step + 4))
        for slot, tokens in sequences:
            if slot in acknowledged:
                assert tokens in [c.token_ids for c in acknowledged[slot].completions]
    # Acknowledged groups that are not trained are served at their step.
    queued = sorted(slot for slot in acknowledged if slot >= 48)
    assert counts.queued >= 2 * len(queued)


def test_process_refuses_empty_volume_of_trained_run(coordinator, tmp_path, monkeypatch):
    """Restarting cannot wear the refusal down: it writes nothing. A checkpoint without a journal is no empty volume."""
    mounted = tmp_path / "spec"
    mounted.mkdir()
    (mounted / "run.yaml").write_text(coordinator.paths.run_file.read_text())
    (mounted / "trained").write_text("true\n")
    monkeypatch.setenv("SCALERL_RUN_FILE", str(mounted / "run.yaml"))
    for _ in range(2):
        coordinator.start(ready=False)
        assert coordinator.process.wait(120) == STEPS_LOST_EXIT_CODE
        (coordinator.paths.checkpoints / ".attempt-1795000000.1-aa").mkdir(parents=True, exist_ok=True)
    last = coordinator.log().splitlines()[-1]
    assert "the run has trained steps, but its volume has neither journal nor checkpoint" in last
    coordinator.paths.checkpoint(3).mkdir(parents=True)
    coordinator.start()
    assert coordinator.terminate() == 0


async def test_process_awaits_copy_for_empty_volume_of_trained_run(
    coordinator, client, tmp_path, monkeypatch
):
    """With ``checkpoint.to``, the trainer may have read a checkpoint whose snapshot continues the run; step 0 is refused."""
    mounted = tmp_path / "spec"
    mounted.mkdir()
    manifest = yaml.safe_load(coordinator.paths.run_file.read_text())
    manifest["spec"].setdefault("checkpoint", {})["to"] = "s3://bucket/run"
    (mounted / "run.yaml").write_text(yaml.safe_dump(manifest))
    (mounted / "trained").write_text("true\n")
    monkeypatch.setenv("SCALERL_RUN_FILE", str(mounted / "run.yaml"))
    coordinator.start()
    with pytest.raises(ErrorAnswer) as refused:
        await client.hello("t")
    assert refused.value.error == "checkpoints-lost"
    assert "neither its volume nor checkpoint.to has a checkpoint" in refused.value.message
    assert coordinator.terminate() == 0


def test_process_accepts_spec_of_earlier_release(coordinator, tmp_path, monkeypatch):
    """By a run that an operator resumes after an upgrade; of a file that a person wrote it is refused."""
    manifest = yaml.safe_load(coordinator.paths.run_file.read_text())
    manifest["spec"].setdefault("generator", {})["leaseSeconds"] = 1
    manifest["spec"].setdefault("podTemplate", {})["labels"] = {"my team": "a"}
    coordinator.paths.run_file.write_text(yaml.safe_dump(manifest))
    coordinator.start(ready=False)
    assert coordinator.process.wait(120) == 2
    assert "spec.podTemplate.labels" in coordinator.log()
    mounted = tmp_path / "spec"
    mounted.mkdir()
    (mounted / "run.yaml").write_text(yaml.safe_dump(manifest))
    monkeypatch.setenv("SCALERL_RUN_FILE", str(mounted / "run.yaml"))
    coordinator.start()
    assert coordinator.terminate() == 0
