"""Rollouts per second in and out of the coordinator on one core, and whether its memory stays flat.

A real coordinator process, pinned to one core, on a real directory (every rollout is synced to disk before it is
acknowledged); on another core, over loopback HTTP, eight actors push groups of 16 completions of 512 tokens, and a
trainer fetches every step, reports it, publishes and checkpoints. A rollout counts when it went in and came out.

    python benchmarks/coordinator.py [--quick] [--rollouts N] [--prompts N] [--record N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from pyarrow import parquet

from scalerl_api import endpoints, wire
from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_tasks import open_task

PROMPTS, COMPLETIONS, TOKENS, ACTORS = 32, 16, 512, 8
CHECKPOINT_STEPS = 10
TOKEN = "benchmark"

RUN = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "coordinator-benchmark"},
    "spec": {
        "model": {"scratch": {}, "contextTokens": 1024},
        "task": {
            "reasoningGym": {"name": "chain_sum", "size": 50_000},
            "verifier": {"name": "exact"},
            "heldOut": {"size": 2},
        },
        "recipe": {
            "promptsPerStep": PROMPTS,
            "completionsPerPrompt": COMPLETIONS,
            "maxCompletionTokens": TOKENS,
            "offPolicy": {"pipeline": {"maxStalenessSteps": 8}},
        },
        "evaluation": {"everySteps": 1_000_000, "samplesPerPrompt": 1},
    },
}


@dataclass
class Load:
    """The client's side: what was sent, served, and measured on the way."""

    session: aiohttp.ClientSession
    url: str
    digest: str
    steps: int
    prompts: int
    """Of a step."""
    version: int = 0
    done: bool = False
    asked: int = 0
    """Rollouts of the trained steps that the coordinator asked to record."""
    push_seconds: list[float] = field(default_factory=list)
    shard_seconds: list[float] = field(default_factory=list)
    rss: list[tuple[int, float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=lambda: english(COMPLETIONS, TOKENS * 4))
    """Of the completions of a recorded group."""

    async def post(self, path: str, message: wire.Struct) -> bytes:
        headers = {"Authorization": f"Bearer {TOKEN}", wire.WIRE_HEADER: str(wire.WIRE_VERSION)}
        body = msgspec.msgpack.encode(message)
        async with self.session.post(self.url + path, data=body, headers=headers) as response:
            data = await response.read()
            if response.status != 200:
                raise SystemExit(f"{path}: {response.status} {data!r}")
            return data

    async def call(self, path: str, message: wire.Struct, kind: type[Any]) -> Any:
        return msgspec.msgpack.decode(await self.post(path, message), type=kind)

    async def act(self, name: str) -> None:
        """An actor without a model: the same tokens for every lease."""
        register = wire.Register(name=name, control_url=f"http://{name}", task_digest=self.digest)
        member = (await self.call(endpoints.MEMBERS, register, wire.Registered)).member_id
        ids, logprobs = random.Random(0).randbytes(TOKENS * 4), struct.pack(f"<{TOKENS}f", *[-0.7] * TOKENS)
        ids = bytes(b & 0x7F for b in ids)
        version = -1  # a new actor has no weights; afterwards it takes what was published
        while not self.done:
            request = wire.LeaseRequest(
                member_id=member, weight_version=version, max_groups=4, wait_seconds=0.5
            )
            leases = (await self.call(endpoints.LEASE, request, wire.Leases)).leases
            version = self.version
            groups = [_group(lease, ids, logprobs, self.texts) for lease in leases]
            self.asked += sum(
                lease.completions
                for lease in leases
                if lease.record and lease.slot < self.steps * self.prompts
            )
            for group in groups:
                started = time.perf_counter()
                reply = await self.call(
                    endpoints.GROUPS, wire.Push(member_id=member, groups=[group]), wire.PushReply
                )
                self.push_seconds.append(time.perf_counter() - started)
                if reply.results != [wire.PushResult.ACCEPTED]:
                    raise SystemExit(f"push: {reply}")

    async def train(self, pid: int) -> float:
        """A trainer without a model. Returns the seconds from the first lease to the last step."""
        name = "trainer"
        hello = wire.TrainerHello(incarnation=name, version=0, world_size=1, snapshot=None)
        await self.call(endpoints.TRAINER_HELLO, hello, wire.TrainerWelcome)
        kept: list[int] = []
        started = 0.0
        while self.version < self.steps:
            request = wire.NextRequest(incarnation=name, version=self.version, wait_seconds=10)
            following = await self.call(endpoints.TRAINER_NEXT, request, wire.Next)
            if following.action is wire.NextAction.PUBLISH:
                await self.publish(name)
                started = started or time.perf_counter()
            if following.action is not wire.NextAction.TRAIN:
                continue
            step = following.step
            begun = time.perf_counter()
            shard = await self.post(
                endpoints.TRAINER_SHARD, wire.ShardRequest(incarnation=name, step=step, rank=0, world_size=1)
            )
            self.shard_seconds.append(time.perf_counter() - begun)
            if len(shard) < self.prompts * COMPLETIONS * TOKENS * 8:
                raise SystemExit(f"step {step}: a shard of {len(shard)} bytes is too small")
            report = wire.StepReport(
                incarnation=name,
                step=step,
                stats={"loss": 0.0},
                busy_seconds=0.0,
                trained_tokens=len(shard) // 8,
            )
            await self.call(endpoints.TRAINER_STEP, report, wire.StepReported)
            self.version += 1
            await self.publish(name)
            if self.version % CHECKPOINT_STEPS == 0:
                kept = [*kept[-1:], self.version]
                begin = wire.CheckpointBegin(incarnation=name, step=self.version)
                await self.call(endpoints.CHECKPOINT_BEGIN, begin, wire.CheckpointSnapshot)
                commit = wire.CheckpointCommit(incarnation=name, step=self.version, kept_steps=kept)
                await self.call(endpoints.CHECKPOINT_COMMIT, commit, wire.Ack)
            if self.version % max(1, self.steps // 10) == 0:
                self.rss.append((self.version * self.prompts * COMPLETIONS, _rss_mib(pid)))
                print(f"{self.rss[-1][0]:>8} rollouts  RSS {self.rss[-1][1]:7.1f} MiB", flush=True)
        self.done = True
        return time.perf_counter() - started

    async def publish(self, name: str) -> None:
        begin = wire.PublishBegin(incarnation=name, version=self.version, wait_seconds=5)
        permit = await self.call(endpoints.PUBLISH_BEGIN, begin, wire.PublishPermit)
        commit = wire.PublishCommit(
            incarnation=name,
            version=self.version,
            updated=[m.member_id for m in permit.members],
            failed=[],
            stats={},
        )
        await self.call(endpoints.PUBLISH_COMMIT, commit, wire.Ack)


def english(count: int, characters: int) -> list[str]:
    """Texts of words from this project's documentation, about as compressible as those of a model."""
    source = Path(__file__).with_name("README.md").read_text().split()
    random_ = random.Random(0)
    texts = []
    for _ in range(count):
        words: list[str] = []
        while sum(map(len, words)) + len(words) < characters:
            at = random_.randrange(len(source) - 20)
            words += source[at : at + random_.randrange(3, 20)]
        texts.append(" ".join(words)[:characters])
    return texts


def _group(lease: wire.Lease, ids: bytes, logprobs: bytes, texts: list[str]) -> wire.Group:
    return wire.Group(
        lease_id=lease.lease_id,
        prompt=lease.prompt,
        slot=lease.slot,
        prompt_id=lease.prompt_id,
        prompt_token_ids=ids[:128],
        completions=[
            wire.Completion(
                token_ids=ids,
                logprobs=logprobs,
                versions=[wire.VersionSpan(lease.policy_version, 0)],
                finish_reason="stop",
            )
            for _ in range(lease.completions)
        ],
        verdicts=wire.Verdicts(scores=[float(i % 2) for i in range(lease.completions)]),
        generation_seconds=0.0,
        text=wire.GroupText(prompt="What is 2 + 2?", reference="4", labels={}, completions=texts)
        if lease.record
        else None,
    )


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    process: subprocess.Popen[bytes], url: str, digest: str, steps: int, prompts: int
) -> dict[str, float]:
    connector = aiohttp.TCPConnector(limit=64)
    async with aiohttp.ClientSession(connector=connector) as session:
        deadline = time.monotonic() + 60
        while True:
            try:
                async with session.get(url + endpoints.READY):
                    break
            except aiohttp.ClientConnectionError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the coordinator did not start") from None
                await asyncio.sleep(0.05)
        load = Load(session, url, digest, steps, prompts)
        cpu = _cpu_seconds(process.pid)
        training = asyncio.create_task(load.train(process.pid))
        actors = [asyncio.create_task(load.act(f"generator-{i}")) for i in range(ACTORS)]
        seconds = await training
        await asyncio.gather(*actors)
        cpu = _cpu_seconds(process.pid) - cpu
        async with session.get(
            url + endpoints.METRICS, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as response:
            lost = re.findall(r"^scalerl_coordinator_lost_rollouts_total (\S+)", await response.text(), re.M)
    rollouts = steps * prompts * COMPLETIONS
    pushes, shards = sorted(load.push_seconds), sorted(load.shard_seconds)
    settled = [mib for count, mib in load.rss if count >= rollouts * 0.3]
    return {
        "rollouts": rollouts,
        "tokens_per_rollout": TOKENS,
        "rollouts_per_second": round(rollouts / seconds, 1),
        "coordinator_cpu_seconds_per_1000_rollouts": round(1000 * cpu / rollouts, 4),
        "push_p50_milliseconds": round(1000 * pushes[len(pushes) // 2], 2),
        "push_p99_milliseconds": round(1000 * pushes[len(pushes) * 99 // 100], 2),
        "shard_p50_milliseconds": round(1000 * shards[len(shards) // 2], 2),
        "rollouts_to_record": load.asked,
        "lost_rollouts": float(lost[0]),
        "rss_first_mib": round(settled[0], 1),
        "rss_last_mib": round(settled[-1], 1),
        "rss_highest_mib": round(max(mib for _, mib in load.rss), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="20,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N", help="of a step (default: 32)")
    parser.add_argument(
        "--record", type=int, default=0, metavar="N", help="spec.rollouts.perStep (default: 0)"
    )
    parser.add_argument(
        "--directory", type=Path, help="where the journal goes (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    rollouts = min(arguments.rollouts, 20_000) if arguments.quick else arguments.rollouts
    steps = -(-rollouts // (arguments.prompts * COMPLETIONS))
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, socket.socket() as probe:
        paths = RunPaths(Path(directory))
        run = {
            **RUN,
            "spec": {
                **RUN["spec"],
                "budget": {"maxSteps": steps + 64},
                "recipe": {**RUN["spec"]["recipe"], "promptsPerStep": arguments.prompts},
                "rollouts": {"perStep": arguments.record},
            },
        }
        paths.run_file.write_text(yaml.safe_dump(run))
        paths.token.write_text(TOKEN)
        digest = open_task(load_run(paths.run_file).spec.task).train.digest
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        url = f"http://127.0.0.1:{port}"
        environ = {
            **os.environ,
            "SCALERL_DIR": directory,
            "SCALERL_NAME": "coordinator-0",
            "SCALERL_COORDINATOR_URL": url,
            "SCALERL_TOKEN_FILE": str(paths.token),
        }
        command = [sys.executable, "-m", "scalerl_coordinator.main", "--listen", f"127.0.0.1:{port}"]
        process = subprocess.Popen(command, env=environ)
        try:
            os.sched_setaffinity(process.pid, cores[:1])
            os.sched_setaffinity(0, cores[1:] or cores)
            figures = asyncio.run(measure(process, url, digest, steps, arguments.prompts))
        finally:
            process.terminate()
            process.wait(30)
        if paths.rollouts.exists():
            files = paths.rollouts.glob("*.parquet")
            figures["recorded_rollouts"] = sum(parquet.read_metadata(path).num_rows for path in files)
    figures["cores"] = len(cores)
    print(json.dumps({"benchmark": "coordinator", "figures": figures}))


if __name__ == "__main__":
    main()
