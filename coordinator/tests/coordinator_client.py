"""A synchronous-looking client of the real server, and ways to make groups and run files, for tests and the benchmark."""

from __future__ import annotations

import io
import struct
from typing import Any, TypeVar

import aiohttp
import msgspec
import yaml
from spec_edits import BASE

from scalerl_api import endpoints, wire

T = TypeVar("T")


class ErrorAnswer(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, problem: wire.Problem) -> None:
        super().__init__(f"{status} {problem.error}: {problem.message}")
        self.status = status
        self.error = problem.error
        self.message = problem.message


class Client:
    """One call an endpoint, raw."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str = "secret") -> None:
        self.session = session
        self.url = url
        self.headers = {"Authorization": f"Bearer {token}", wire.WIRE_HEADER: str(wire.WIRE_VERSION)}

    async def post(self, path: str, message: Any, kind: type[T]) -> T:
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        # A stream: aiohttp warns about plain bytes above 1 MiB.
        async with self.session.post(
            self.url + path, data=io.BytesIO(body), headers=self.headers
        ) as response:
            data = await response.read()
            if response.status != 200:
                raise ErrorAnswer(response.status, msgspec.msgpack.decode(data, type=wire.Problem))
            return msgspec.msgpack.decode(data, type=kind)

    async def status(self) -> wire.Status:
        async with self.session.get(self.url + endpoints.STATUS, headers=self.headers) as response:
            assert response.status == 200
            return msgspec.msgpack.decode(await response.read(), type=wire.Status)

    async def register(self, name: str, digest: str, held: list[str] | None = None) -> str:
        message = wire.Register(
            name=name, control_url=f"http://{name}", task_digest=digest, held_leases=held or []
        )
        return (await self.post(endpoints.MEMBERS, message, wire.Registered)).member_id

    async def heartbeat(
        self, member: str, version: int, *, healthy: bool = True, busy: float = 0.0, tokens: int = 0
    ) -> None:
        message = wire.Heartbeat(
            member_id=member,
            weight_version=version,
            healthy=healthy,
            busy_seconds=busy,
            generated_tokens=tokens,
        )
        await self.post(endpoints.HEARTBEAT, message, wire.Ack)

    async def lease(self, member: str, version: int, groups: int, wait: float = 0.0) -> wire.Leases:
        message = wire.LeaseRequest(
            member_id=member, weight_version=version, max_groups=groups, wait_seconds=wait
        )
        return await self.post(endpoints.LEASE, message, wire.Leases)

    async def push(self, member: str, groups: list[wire.Group]) -> wire.PushReply:
        return await self.post(endpoints.GROUPS, wire.Push(member_id=member, groups=groups), wire.PushReply)

    async def responses(self, prompt: wire.PromptRef, digest: bytes) -> list[wire.PastResponse]:
        request = wire.ResponsesRequest(prompt=prompt, digest=digest)
        return (await self.post(endpoints.RESPONSES, request, wire.Responses)).responses

    async def hello(
        self, incarnation: str, version: int = 0, snapshot: bytes | None = None
    ) -> wire.TrainerWelcome:
        message = wire.TrainerHello(incarnation=incarnation, version=version, world_size=1, snapshot=snapshot)
        return await self.post(endpoints.TRAINER_HELLO, message, wire.TrainerWelcome)

    async def next(self, incarnation: str, version: int, wait: float = 0.0) -> wire.Next:
        message = wire.NextRequest(incarnation=incarnation, version=version, wait_seconds=wait)
        return await self.post(endpoints.TRAINER_NEXT, message, wire.Next)

    async def shard(
        self, incarnation: str, step: int, rank: int = 0, world_size: int = 1, wait: float = 0.0
    ) -> wire.Shard:
        message = wire.ShardRequest(
            incarnation=incarnation, step=step, rank=rank, world_size=world_size, wait_seconds=wait
        )
        return await self.post(endpoints.TRAINER_SHARD, message, wire.Shard)

    async def report(self, incarnation: str, step: int, stats: dict[str, float] | None = None) -> None:
        message = wire.StepReport(
            incarnation=incarnation, step=step, stats=stats or {}, busy_seconds=0.0, trained_tokens=1
        )
        await self.post(endpoints.TRAINER_STEP, message, wire.StepReported)

    async def publish(self, incarnation: str, version: int, wait: float = 0.0) -> wire.PublishPermit:
        """Begin and, when permitted, commit to everyone at once."""
        begin = wire.PublishBegin(incarnation=incarnation, version=version, wait_seconds=wait)
        permit = await self.post(endpoints.PUBLISH_BEGIN, begin, wire.PublishPermit)
        if permit.ready:
            commit = wire.PublishCommit(
                incarnation=incarnation,
                version=version,
                updated=[m.member_id for m in permit.members],
                failed=[],
                stats={},
            )
            await self.post(endpoints.PUBLISH_COMMIT, commit, wire.Ack)
        return permit

    async def checkpoint(self, incarnation: str, step: int, kept: list[int]) -> bytes:
        begin = wire.CheckpointBegin(incarnation=incarnation, step=step)
        snapshot = await self.post(endpoints.CHECKPOINT_BEGIN, begin, wire.CheckpointSnapshot)
        commit = wire.CheckpointCommit(incarnation=incarnation, step=step, kept_steps=kept)
        await self.post(endpoints.CHECKPOINT_COMMIT, commit, wire.Ack)
        return snapshot.snapshot

    async def stop(self, reason: str) -> None:
        await self.post(endpoints.STOP, wire.Stop(reason=reason), wire.Ack)


def make_group(
    lease: wire.Lease,
    *,
    tokens: int = 4,
    scores: list[float] | None = None,
    version: int | None = None,
    logprob: float = -0.5,
    parts: dict[str, list[float]] | None = None,
    teacher: float | None = None,
) -> wire.Group:
    """A group for ``lease``; scores vary unless given. teacher: its log-probability of every token."""
    if scores is None:
        scores = [float(i % 2) for i in range(lease.completions)]
    version = lease.policy_version if version is None else version
    ids = struct.pack(f"<{tokens}i", *range(tokens))
    logprobs = struct.pack("<f", logprob) * tokens
    return wire.Group(
        lease_id=lease.lease_id,
        prompt=lease.prompt,
        slot=lease.slot,
        prompt_id=lease.prompt_id,
        prompt_token_ids=struct.pack("<3i", 1, 2, 3),
        completions=[
            wire.Completion(
                token_ids=ids,
                logprobs=logprobs,
                versions=[wire.VersionSpan(version, 0)],
                finish_reason="stop",
                teacher_logprobs=b"" if teacher is None else struct.pack("<f", teacher) * tokens,
            )
            for _ in scores
        ],
        verdicts=wire.Verdicts(scores=scores, parts=parts or {}),
        generation_seconds=0.1,
    )


def run_text(**overrides: object) -> str:
    """A small run file; ``overrides`` replace sections of the spec."""
    spec: dict[str, object] = BASE["spec"] | {
        "model": {"scratch": {}, "contextTokens": 64},
        "budget": {"maxSteps": 4},
    }
    return yaml.safe_dump(BASE | {"metadata": {"name": "test"}, "spec": spec | overrides})
