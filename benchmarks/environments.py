"""What episodes of several turns cost an actor beside its plain path, with a stand-in for vLLM.

    python benchmarks/environments.py [--quick] [--rounds 8]

``one turn`` is the environment ``retry`` with ``maxTurns`` 1 against the same verifier without an environment, in turn: processor time of
the actor and its grading process a completion of 32 tokens, in groups of 16, from the lease to the group that is pushed. The completions
come from a server in another process, which is not counted. ``four turns`` are episodes of an environment in a process of its own, each
with three messages, in groups of 16, one request and one step a turn; the stand-in is in the same process and answers at once.
``slow environment`` are such episodes by an actor's own leases, where a step takes 1 s, a reply 0.2 s, and the server runs 64 sequences at once:
that would be 80 episodes/s without the environment.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from msgspec import structs
from support.vllm_process import free_port

from scalerl_api.spec import PromptSpec
from scalerl_api.wire import Group, Lease, LeaseRequest, PromptRef, PushReply, PushResult, Split
from scalerl_api.wire import Leases as LeasesReply
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration, ServerMonitor
from scalerl_generator.rollouts.concurrency import Concurrency
from scalerl_generator.rollouts.delivery import Delivery
from scalerl_generator.rollouts.episodes import EpisodeSampler
from scalerl_generator.rollouts.generation import RolloutGenerator
from scalerl_generator.rollouts.leasing import Leasing
from scalerl_generator.rollouts.partial_reports import KeptCompletions, PartialReports
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.rollouts.task_runtimes import TaskRuntime
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import Sampled, Span
from scalerl_tasks import Graded, GradingPool, Prompt, Verdict, VerifierConfig
from scalerl_tasks.environments.environment_verifier import EnvironmentConfig
from scalerl_tasks.environments.episodes import EnvironmentGrader, EpisodeGrader, Retry
from scalerl_tasks.environments.gate import EnvironmentGate
from scalerl_tasks.environments.protocol import Message
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.python_function import PythonFunction
from scalerl_trainer.models.scratch import EOS, train_tokenizer

COMPLETIONS = 16
GROUPS_AT_ONCE = 5
CAPACITY, REPLY_SECONDS, STEP_SECONDS = 64, 0.2, 1.0
REPLY_TOKENS = 32
PROMPT = Prompt("p", "2+2=" + "5" * (REPLY_TOKENS - 5), "4")
"""The server echoes its tokens."""
TOKEN = "stand-in"
SERVER = Path(__file__).parents[1] / "generator/tests/stand_in_vllm.py"
ENVIRONMENT = """
from scalerl_tasks.environments.protocol import Step

class Four:
    def step(self, prompt, replies):
        return Step(done=True, reward=1.0) if len(replies) == 4 else Step([f"reply {len(replies)} was read"])
"""


class StandIn:
    """Answers like a :class:`~scalerl_generator.vllm_client.VllmClient`: digits, and an end token."""

    routed_experts = False

    def __init__(self, end: int) -> None:
        self._ids = np.full(REPLY_TOKENS, 10, np.int32)
        self._ids[-1] = end

    async def generate(self, prompt: Sequence[int], *, n: int, **_: Any) -> list[Sampled]:
        await asyncio.sleep(0)
        zeros = np.zeros(REPLY_TOKENS, np.bool_)
        logprobs = np.full(REPLY_TOKENS, -1.0, np.float32)
        return [Sampled(self._ids, logprobs, zeros, (Span(0, 0, REPLY_TOKENS),), "stop") for _ in range(n)]


class Bench:
    """An actor's parts around the stand-in."""

    def __init__(self, folder: Path, url: str) -> None:
        tokenizer = train_tokenizer(["0123456789+= abcdefghijklmnopqrstuvwxyz"], 300)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
        self.codec = PromptCodec(folder, PromptSpec(), 4096)
        self.source: Any = [PROMPT]
        self.http: Any = VllmClient(url, TOKEN)
        self.client: Any = StandIn(self.codec.tokenizer.end_token_id)
        self.state = ServerState()
        self.state.mark_up()
        self.state.complete_update(0)
        self.busy = BusyClock()
        self.metrics = ActorMetrics(self.state, self.busy)
        self.monitor = ServerMonitor(self.client, self.state, self.metrics)
        self.thread = ThreadPoolExecutor(1)

    def partials(self) -> PartialReports:
        nothing: Any = None
        return PartialReports(
            *(nothing, nothing, self.monitor, self.state, self.metrics),
            vocabulary_size=300,
            max_staleness_steps=1,
        )

    def rollouts(self, turns: int, grader: GroupGrader, episodes: EpisodeGrader | None) -> RolloutGenerator:
        """Of groups with an environment if ``episodes`` is given."""
        sampler = None
        if episodes is not None:
            gate = EnvironmentGate(episodes, "the environment")
            sampler = EpisodeSampler(gate, self.codec, turns, 64, self.thread, self.metrics, self.busy)
        section = TaskRuntime(self.source, self.codec, grader, sampler)
        return RolloutGenerator(
            *(self.http if turns == 1 else self.client, self.monitor, self.state, self.busy, self.metrics),
            {(0, Split.TRAIN): section},
            self.thread,
            max_sequences=64,
            kept=KeptCompletions(max_sequences=64, max_staleness_steps=1),
            partials=self.partials(),
        )

    async def group(self, turns: int, grader: GroupGrader, episodes: EpisodeGrader | None) -> None:
        """A group from lease to push, with an environment if ``episodes`` is given."""
        rollouts = self.rollouts(turns, grader, episodes)
        generated = await rollouts.generate(self.lease(turns), lambda _: None)
        packed = await rollouts.grade(generated, lambda: None)
        assert all(len(completion.turns) == turns - 1 for completion in packed.completions)

    def lease(self, turns: int) -> Lease:
        return Lease(
            lease_id="l",
            prompt=PromptRef(0, Split.TRAIN, 0),
            slot=0,
            prompt_id="p",
            completions=COMPLETIONS,
            max_tokens=64 * turns,
            temperature=1.0,
            remaining_seconds=300.0,
            policy_version=0,
        )


class SlowEnvironment:
    """Answers three replies after a second each, and ends with the fourth."""

    part_names: tuple[str, ...] = ()

    async def steps(self, prompt: Prompt, episodes: Sequence[Sequence[str]], **_: Any) -> list[Graded]:
        await asyncio.sleep(STEP_SECONDS)
        says = (Message("go on"),)
        return [Graded(Verdict(1.0), None, says if len(one) < 4 else ()) for one in episodes]


class Limited(StandIn):
    """Runs :data:`CAPACITY` sequences at once, a reply in :data:`REPLY_SECONDS`."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self._places = asyncio.Semaphore(CAPACITY)

    async def generate(self, prompt: Sequence[int], *, n: int, **given: Any) -> list[Sampled]:
        async def one() -> None:
            async with self._places:
                await asyncio.sleep(REPLY_SECONDS)

        await asyncio.gather(*(one() for _ in range(n)))
        return await super().generate(prompt, n=n, **given)


class Leases:
    """A coordinator that always has leases, and accepts each group."""

    def __init__(self, template: Lease) -> None:
        self._template, self._given, self.episodes = template, 0, 0

    async def lease(self, request: LeaseRequest) -> LeasesReply:
        await asyncio.sleep(0)
        given = range(self._given, self._given + request.max_groups)
        self._given = given.stop
        return LeasesReply(
            leases=[structs.replace(self._template, lease_id=f"l{at}", slot=at) for at in given]
        )

    async def push(self, _: str, groups: Sequence[Group]) -> PushReply:
        self.episodes += sum(len(group.completions) for group in groups)
        return PushReply(results=[PushResult.ACCEPTED] * len(groups), reasons=[None] * len(groups))

    async def release(self, *_: Any) -> None:
        pass


async def slow_environment(bench: Bench, warm_up: float, seconds: float) -> dict[str, float]:
    """Episodes a second of an actor that leases, after a time in which it learns how many groups fill its server."""
    bench.client = Limited(bench.codec.tokenizer.end_token_id)
    environment: Any = SlowEnvironment()
    coordinator: Any = Leases(bench.lease(4))
    registration = Registration(
        *(coordinator, bench.state, bench.busy, bench.metrics), name="g", control_url="http://h:1"
    )
    registration.member_id = "m"
    delivery = Delivery(coordinator, registration, bench.metrics)
    leasing = Leasing(
        *(coordinator, registration, bench.state, bench.rollouts(4, environment, environment), delivery),
        *(bench.metrics, bench.partials()),
        concurrency=Concurrency(CAPACITY, COMPLETIONS, adaptive=False),
        per_group=COMPLETIONS,
    )
    tasks = [asyncio.create_task(leasing.run()), asyncio.create_task(delivery.run())]
    await asyncio.sleep(warm_up)
    before, busy = coordinator.episodes, bench.busy.seconds
    await asyncio.sleep(seconds)
    found = {
        "slow_environment_episodes_per_second": (coordinator.episodes - before) / seconds,
        "slow_environment_busy_fraction": (bench.busy.seconds - busy) / seconds,
    }
    for task in tasks:
        task.cancel()
    await leasing.close(0.0, "the benchmark has ended")
    return found


def cpu_seconds() -> float:
    """Of this process and its grading processes."""
    own = psutil.Process()
    graders = [child for child in own.children(recursive=True) if str(SERVER) not in child.cmdline()]
    times = [process.cpu_times() for process in (own, *graders)]
    return sum(t.user + t.system for t in times)


async def load(group: Callable[[], Awaitable[None]], groups: int) -> tuple[float, float]:
    """Processor seconds and seconds of a number of groups."""
    gate = asyncio.Semaphore(GROUPS_AT_ONCE)

    async def one() -> None:
        async with gate:
            await group()

    cpu, started = cpu_seconds(), time.perf_counter()
    await gather_all(one() for _ in range(groups))
    return cpu_seconds() - cpu, time.perf_counter() - started


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The stand-in of the tests, in a process; its address."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), TOKEN])
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


async def measure(folder: Path, url: str, rounds: int, groups: int) -> dict[str, float]:
    bench = Bench(folder, url)
    await bench.http.call("POST", "/finish_weight_update", {"weight_version": "0"}, 10.0)
    file = folder / "four.py"
    file.write_text(ENVIRONMENT)
    four = VerifierConfig(
        "environment", environment=EnvironmentConfig(python=PythonFunction("Four", str(file)))
    )
    async with GradingPool(VerifierConfig("number")) as pool, GradingPool(four) as of_four:
        retry, steps = Retry(pool), EnvironmentGrader(of_four)
        ways: list[Callable[[], Awaitable[None]]] = [
            lambda: bench.group(1, pool, None),
            lambda: bench.group(1, pool, retry),
        ]
        for way in ways:
            await load(way, groups)
        ratios, seconds = [], [0.0, 0.0]
        for number in range(rounds):
            of_ways = {}
            for at in (0, 1) if number % 2 else (1, 0):
                of_ways[at], _ = await load(ways[at], groups)
                seconds[at] += of_ways[at]
            ratios.append(of_ways[1] / of_ways[0])
        await bench.http.close()
        await load(lambda: bench.group(4, of_four, steps), 2)
        cpu, wall = await load(lambda: bench.group(4, of_four, steps), max(2, groups // 4))
    slow = await slow_environment(bench, *((40.0, 20.0) if rounds > 2 else (20.0, 10.0)))
    count, episodes = rounds * groups * COMPLETIONS, max(2, groups // 4) * COMPLETIONS
    return slow | {
        "plain_cpu_ms": 1000 * seconds[0] / count,
        "one_turn_cpu_ms": 1000 * seconds[1] / count,
        "one_turn_ratio": seconds[1] / seconds[0],
        "one_turn_ratio_median": statistics.median(ratios),
        "four_turns_episodes_per_second": episodes / wall,
        "four_turns_episodes_per_cpu_second": episodes / cpu,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="two rounds")
    p.add_argument("--rounds", type=int, default=8, help="of both ways at one turn")
    given = p.parse_args()
    with tempfile.TemporaryDirectory() as directory, server() as url:
        found = asyncio.run(measure(Path(directory), url, 2 if given.quick else given.rounds, 100))
    for name, value in found.items():
        print(f"{name:>36} {value:9.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
