"""A whole small run over real HTTP: one generator, one trainer, four steps, points at 0, 2 and 4."""

from __future__ import annotations

import csv
import json

from coordinator_client import Client, make_group

from scalerl_api import wire


async def generate_all(client: Client, member: str, version: int) -> list[wire.Lease]:
    """Serve leases until there are none."""
    served: list[wire.Lease] = []
    while leases := (await client.lease(member, version, 3)).leases:
        reply = await client.push(member, [make_group(lease, version=version) for lease in leases])
        assert reply.results == [wire.PushResult.ACCEPTED] * len(leases)
        served += leases
    return served


async def test_whole_run(coordinator, client):
    coordinator.start()
    member = await client.register("generator-0", coordinator.digest)
    assert (await client.lease(member, -1, 8)).leases == []
    await client.hello("a")
    version, trained, actions = 0, [], []
    while True:
        following = await client.next("a", version, wait=5)
        actions.append(following.action)
        match following.action:
            case wire.NextAction.PUBLISH:
                await client.publish("a", version, wait=5)
            case wire.NextAction.TRAIN:
                shard = await client.shard("a", version)
                trained.append([group.slot for group in shard.groups])
                assert len(shard.sequences) == 8
                await client.report("a", version, {"loss": 0.5})
                version += 1
                while not (await client.publish("a", version, wait=1)).ready:
                    pass
            case wire.NextAction.FINISH:
                break
            case wire.NextAction.WAIT:
                raise AssertionError(await client.status())
        leases = await generate_all(client, member, version)
        for lease in leases:
            prompts = coordinator.task.train if lease.split is wire.Split.TRAIN else coordinator.task.held_out
            assert prompts[lease.prompt.index].id == lease.prompt_id
    assert trained == [[4 * t + i for i in range(4)] for t in range(4)]
    assert (await client.status()).phase is wire.Phase.FINISHING
    assert (await client.lease(member, version, 1)).stop
    await client.checkpoint("a", 4, [4])
    status = await client.status()
    assert status.phase is wire.Phase.FINISHED
    assert (status.counts.acknowledged, status.counts.trained, status.counts.queued) == (32, 32, 0)
    assert [point.version for point in status.points] == [0, 2, 4]
    assert [point.work_tokens for point in status.points] == [0, 64, 128]
    assert status.max_staleness_steps == 2
    lines = [json.loads(line) for line in coordinator.paths.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["loss"] == 0.5
    assert coordinator.terminate() == 0
    with coordinator.paths.curve.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["compute"], row["reward"], row["mixed_versions"]) for row in rows] == [
        ("0", "0.5", "false"),
        ("64", "0.5", "false"),
        ("128", "0.5", "false"),
    ]
