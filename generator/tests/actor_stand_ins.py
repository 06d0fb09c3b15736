"""Fakes around the actor: a coordinator with the wire protocol, a tiny tokenizer, processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import stand_in_vllm
import yaml
from aiohttp import web
from free_port import free_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_api.process import ProcessEnvironment
from scalerl_api.wire import (
    WIRE_HEADER,
    WIRE_VERSION,
    Ack,
    Group,
    GroupJoin,
    Heartbeat,
    Lease,
    LeaseRequest,
    Leases,
    Partials,
    PartialsReply,
    Problem,
    PromptRef,
    Push,
    PushReply,
    PushResult,
    Register,
    Registered,
    Release,
    ReleaseCause,
    Split,
    TensorSpec,
    WeightFiles,
    WeightReceive,
    WeightReceived,
)
from scalerl_coordinator.partials import PartialKey, PartialStore, partial_key
from scalerl_generator.actor import Arguments, exit_code, run_actor

TOKEN = "test-token"
CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz<>?!:{|}\n_"
END = 1


def write_tokenizer(directory: Path) -> None:
    """A character tokenizer with an end token, as transformers would save it."""
    vocabulary = {"<pad>": 0, "<eos>": END} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))


def write_run(directory: Path, prompts: list[str], **changes: Any) -> None:
    """A run directory: 4 held-out prompts, the rest to train on, each its own answer, verifier ``exact``."""
    write_tokenizer(directory / "model")
    (directory / "token").write_text(TOKEN)
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "answer": p}) + "\n" for p in prompts))
    spec: dict[str, Any] = {
        "model": {"path": str(directory / "model"), "contextTokens": 64},
        "task": {"jsonl": {"path": str(data)}, "verifier": {"name": "exact"}, "heldOut": {"size": 4}},
        "recipe": {"promptsPerStep": 4, "completionsPerPrompt": 4, "maxCompletionTokens": 32},
        "generator": {"maxConcurrentSequences": 16},
        "budget": {"maxSteps": 1},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = spec
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    # The tokenizer cannot write the default phrase of an interruption.
    spec["recipe"].setdefault("length", {"none": {}})
    run = {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "test"},
        "spec": spec,
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(run))


@dataclass
class CoordinatorStandIn:
    """The HTTP contract of the coordinator over a list of leases; no journal, no staleness, no training."""

    heartbeat_seconds: float = 0.2
    port: int = field(default_factory=free_port)
    todo: deque[Lease] = field(default_factory=deque)
    leased: dict[str, Lease] = field(default_factory=dict)
    members: dict[str, Register] = field(default_factory=dict)
    beats: list[Heartbeat] = field(default_factory=list)
    requests: list[LeaseRequest] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    pushes: list[Push] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    given_up: list[Lease] = field(default_factory=list)
    """Released for another cause than the member's own failure."""
    partials: PartialStore = field(default_factory=PartialStore)
    reports: list[Partials] = field(default_factory=list)
    stop: bool = False
    lose_push_answers: int = 0
    _runner: web.AppRunner | None = None
    _registered: int = 0
    _offered: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        for path, kind, answer in (
            (endpoints.MEMBERS, Register, self._register),
            (endpoints.HEARTBEAT, Heartbeat, self._heartbeat),
            (endpoints.LEASE, LeaseRequest, self._lease),
            (endpoints.GROUPS, Push, self._push),
            (endpoints.RELEASE, Release, self._release),
            (endpoints.PARTIALS, Partials, self._partials),
        ):
            app.router.add_post(path, self._handler(kind, answer))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def kill(self) -> None:
        """The coordinator is stopped and forgets its members; leases and groups stay, as in its journal."""
        assert self._runner is not None
        await self._runner.cleanup()
        self.members.clear()

    def offer(self, count: int, prompt_ids: list[str], split: Split = Split.TRAIN, **changes: Any) -> None:
        """Add leases for the prompts of a split, in order; ``changes`` to the fields of each."""
        for i in range(count):
            index = i % len(prompt_ids)
            lease = Lease(
                lease_id=f"{split.value}-{self._offered}",
                prompt=PromptRef(0, split, index),
                slot=i,
                prompt_id=prompt_ids[index],
                completions=4,
                max_tokens=32,
                temperature=1.0,
                remaining_seconds=600.0,
                policy_version=0,
            )
            self._offered += 1
            self.todo.append(msgspec.structs.replace(lease, **changes))

    def _handler(self, kind: type[Any], answer: Callable[[Any], Any]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            return reply(200, await answer(msgspec.msgpack.decode(await request.read(), type=kind)))

        return handle

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return reply(401, Problem(error="unauthorized", message="the run's token is missing or wrong"))
        assert request.headers[WIRE_HEADER] == str(WIRE_VERSION)
        try:
            return await handler(request)
        except KeyError as error:
            return reply(404, Problem(error="unknown-member", message=f"no member {error}"))

    async def _register(self, message: Register) -> Registered:
        self._registered += 1
        member_id = f"m{self._registered}"
        self.members = {k: v for k, v in self.members.items() if v.name != message.name} | {
            member_id: message
        }
        return Registered(member_id=member_id, heartbeat_seconds=self.heartbeat_seconds)

    async def _heartbeat(self, message: Heartbeat) -> Ack:
        self.members[message.member_id]
        self.beats.append(message)
        if not message.healthy:
            self.todo.extendleft(self.leased.values())
            self.leased.clear()
        return Ack()

    async def _lease(self, message: LeaseRequest) -> Leases:
        self.members[message.member_id]
        self.requests.append(message)
        deadline = time.monotonic() + message.wait_seconds
        while not self.todo and not self.stop and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            self.members[message.member_id]
        given = [self.todo.popleft() for _ in range(min(message.max_groups, len(self.todo)))]
        self.leased |= {lease.lease_id: lease for lease in given}
        partials = [
            self.partials.take(_key(lease), lease, range(lease.policy_version + 1), 1 << 30)
            for lease in given
        ]
        given = [
            msgspec.structs.replace(lease, partial=partial)
            for lease, partial in zip(given, partials, strict=True)
        ]
        return Leases(leases=given, stop=self.stop)

    async def _partials(self, message: Partials) -> PartialsReply:
        self.members[message.member_id]
        self.reports.append(message)
        known = {lease.lease_id: lease for lease in [*self.leased.values(), *self.todo]}
        leases = [known.get(group.lease_id) for group in message.groups]
        unstored: dict[str, list[str]] = {"stored": [], "missing": [], "full": []}
        for lease, group in zip(leases, message.groups, strict=True):
            if lease is not None:
                unstored[self.partials.put(_key(lease), group)].append(group.lease_id)
        return PartialsReply(missing=unstored["missing"], full=unstored["full"])

    def reassign(self) -> None:
        """All leases expire, and are offered again under other ids."""
        for lease in self.leased.values():
            self._offered += 1
            self.todo.append(msgspec.structs.replace(lease, lease_id=f"again-{self._offered}"))
        self.leased.clear()

    async def _push(self, message: Push) -> PushReply:
        self.members[message.member_id]
        self.pushes.append(message)
        results = []
        for group in message.groups:
            if group.lease_id in self.groups:
                results.append(PushResult.DUPLICATE)
            elif group.lease_id in self.leased:
                del self.leased[group.lease_id]
                self.groups[group.lease_id] = group
                results.append(PushResult.ACCEPTED)
            else:
                results.append(PushResult.LATE)
        if self.lose_push_answers:
            self.lose_push_answers -= 1
            raise web.HTTPServiceUnavailable
        return PushReply(results=results, reasons=[None] * len(results))

    async def _release(self, message: Release) -> Ack:
        self.members[message.member_id]
        self.releases.append(message)
        for lease_id in message.lease_ids:
            if (lease := self.leased.pop(lease_id, None)) is not None:
                if message.cause is ReleaseCause.UNSERVED:
                    self.todo.appendleft(lease)
                else:
                    self.given_up.append(lease)
        return Ack()


def _key(lease: Lease) -> PartialKey:
    return partial_key(lease.split, lease.slot, lease.policy_version)


def reply(status: int, body: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.msgpack.encode(body), content_type="application/msgpack")


@dataclass
class Generator:
    """A fake server and the actor, in the test's process; :meth:`end` stops everything."""

    directory: Path
    coordinator_url: str
    seconds_per_token: float = 0.0
    server_port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    name: str = "generator-0"
    _runner: web.AppRunner | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    async def start_server(self) -> None:
        self._runner = await stand_in_vllm.serve(self.server_port, TOKEN, self.seconds_per_token)

    async def kill_server(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def start_actor(self) -> None:
        arguments = Arguments(self.server_url, "127.0.0.1", self.control_port, self.control_url)
        environment = ProcessEnvironment(RunPaths(self.directory), self.name, self.coordinator_url, TOKEN)
        spec = load_run(self.directory / "run.yaml").spec
        self._task = asyncio.create_task(run_actor(arguments, environment, spec, self.stop))

    async def kill_actor(self) -> None:
        """It ends at once, without unregistering."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def terminate(self) -> None:
        self.stop.set()

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def exit_code(self, seconds: float = 240.0) -> int:
        """As the process would exit; what ended it is logged."""
        assert self._task is not None
        try:
            async with asyncio.timeout(seconds):
                await self._task
        except Exception as error:
            logging.getLogger("test").error("%s", error)
            return exit_code(error)
        return 0

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._runner is not None:
            await self._runner.cleanup()


@dataclass
class GeneratorProcesses(Generator):
    """The same as processes of their own, which can be killed."""

    server: subprocess.Popen[bytes] | None = None
    actor: subprocess.Popen[bytes] | None = None

    async def start_server(self) -> None:
        program = Path(__file__).parent / "stand_in_vllm.py"
        argv = [sys.executable, str(program), str(self.server_port), TOKEN, str(self.seconds_per_token)]
        self.server = await asyncio.to_thread(subprocess.Popen, argv)

    async def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        await asyncio.to_thread(self.server.wait, 120)

    async def start_actor(self) -> None:
        argv = [sys.executable, "-m", "scalerl_generator.actor", "--server", self.server_url]
        argv += ["--listen", f"127.0.0.1:{self.control_port}", "--advertise", self.control_url]
        env = os.environ | role_environment(self.directory, "generator-0", self.coordinator_url)
        with (self.directory / "actor.log").open("ab") as log:
            self.actor = await asyncio.to_thread(subprocess.Popen, argv, env=env, stderr=log)

    def terminate(self) -> None:
        assert self.actor is not None
        self.actor.send_signal(signal.SIGTERM)

    @property
    def running(self) -> bool:
        return self.actor is not None and self.actor.poll() is None

    @property
    def log(self) -> str:
        return (self.directory / "actor.log").read_text()

    async def exit_code(self, seconds: float = 240.0) -> int:
        assert self.actor is not None
        return await asyncio.to_thread(self.actor.wait, seconds)

    async def end(self) -> None:
        for process in (self.actor, self.server):
            if process is not None and process.poll() is None:
                process.kill()
                await asyncio.to_thread(process.wait, 120)


def role_environment(directory: Path, name: str, coordinator_url: str) -> dict[str, str]:
    return {
        "SCALERL_DIR": str(directory),
        "SCALERL_NAME": name,
        "SCALERL_COORDINATOR_URL": coordinator_url,
        "SCALERL_TOKEN_FILE": str(directory / "token"),
    }


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until ``condition`` is true; fail if it is not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        await asyncio.sleep(0.01)


class TrainerSide:
    """The trainer's requests to an actor."""

    def __init__(self, session: aiohttp.ClientSession, control_url: str, token: str = TOKEN) -> None:
        self._session, self._url = session, control_url
        self.headers = {"Authorization": f"Bearer {token}", WIRE_HEADER: str(WIRE_VERSION)}

    async def post(self, path: str, message: Any, kind: type[Any]) -> Any:
        """The decoded answer: ``kind``, or a Problem."""
        body = msgspec.msgpack.encode(message)
        async with self._session.post(self._url + path, data=body, headers=self.headers) as response:
            return msgspec.msgpack.decode(
                await response.read(), type=kind if response.status == 200 else Problem
            )

    async def join(self, epoch: int) -> Any:
        message = GroupJoin(
            epoch=epoch,
            store_host="127.0.0.1",
            store_port=1,
            rank=1,
            world_size=2,
            backend="gloo",
            timeout_seconds=120.0,
        )
        return await self.post(endpoints.WEIGHTS_JOIN, message, Ack)

    async def receive(
        self, epoch: int, version: int, timeout_seconds: float = 120.0, files: WeightFiles | None = None
    ) -> Any:
        message = WeightReceive(
            epoch=epoch,
            version=version,
            tensors=[TensorSpec("w", "float32", [2])],
            bucket_bytes=1024,
            timeout_seconds=timeout_seconds,
            files=files,
        )
        return await self.post(endpoints.WEIGHTS_RECEIVE, message, WeightReceived)

    async def publish(self, version: int) -> None:
        """Join a group of its own for this version and send it; must succeed."""
        assert await self.join(version) == Ack()
        received = await self.receive(version, version)
        assert isinstance(received, WeightReceived), received
