"""Weight updates of a real vLLM server during generation."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM
from vllm_with_updates import (
    BUCKET_BYTES,
    JOIN_SECONDS,
    TOKEN,
    Sender,
    Server,
    build_model,
    connect,
    manifest,
    new_weights,
    publish,
    publish_files,
    receive,
    score,
    start_server,
    weight_version,
    weight_writer,
    write,
)

from scalerl_api.weight_layout import lay_out
from scalerl_api.wire import MASKED, GroupJoin, Lease, PromptRef, Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.rollouts.completion_streams import CompletionStreams, sample_plain
from scalerl_generator.rollouts.interruption import Interruption, ThoughtInterrupter
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import (
    UNVERSIONED,
    Part,
    Sampled,
    ServerDown,
    ServerRefused,
    Span,
    VllmError,
)
from scalerl_generator.weights.receiver_group import ReceiverGroup
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_generator.weights.update_reports import UpdateFailed
from scalerl_trainer.publish.weight_writer import WeightWriter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SPAN_LIMIT = 900


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_server(tmp_path_factory.mktemp("vllm"), tied=True, dtype="float32", fp32_head=True)


@pytest.fixture(scope="module")
def bf16_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_server(tmp_path_factory.mktemp("vllm"), tied=True, dtype="bfloat16", fp32_head=True)


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[Server]:
    options = ["--tensor-parallel", "2"]
    # vLLM pads to 64 tokens: of fewer, the second worker would have no row of the embedding.
    build = partial(build_model, vocabulary_size=128)
    yield from start_server(
        tmp_path, tied=True, dtype="float32", fp32_head=True, options=options, build=build
    )


def start_doomed_sender(epoch: int, version: int) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("doomed_sender.py")
    argv = [sys.executable, str(script), str(epoch), str(version), str(BUCKET_BYTES)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


PROBE = [int(t) for t in np.random.default_rng(3).integers(2, 64, 60)]


async def test_vllm_update_with_generations_in_flight(server: Server) -> None:
    async with VllmClient(server.url, TOKEN) as client:
        assert await weight_version(client) == "default"
        sender = await connect(client, 1)
        reported: list[int] = []

        async def stream() -> PartialCompletion:
            completion = PartialCompletion()

            def on_part(_: int, part: Part) -> None:
                completion.append(part, UNVERSIONED)
                reported.append(len(part.token_ids))
                if isinstance(part, Sampled):
                    completion.settle(0, part.weight_versions)

            await client.stream([5, 6, 7], n=1, max_tokens=SPAN_LIMIT, cache_salt="0", on_part=on_part)
            return completion

        published = asyncio.Event()

        async def streams() -> list[PartialCompletion]:
            """One after the other, as they may end before the update is there."""
            found = [await stream()]
            while not published.is_set():
                found.append(await stream())
            return found

        policy = new_weights(server.model, 1)
        long = asyncio.gather(*(streams() for _ in range(16)))
        async with asyncio.timeout(120):
            while not reported:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        before = await client.prompt_logprobs(PROBE)
        await publish(client, sender, policy, 1)
        published.set()
        assert await weight_version(client) == "1"
        after = await client.prompt_logprobs(PROBE)
        assert np.abs(after - score(policy, PROBE)).max() < 1e-4
        assert np.abs(after - before).max() > 0.1

        sampled = [completion for found in await long for completion in found]
        assert sum(reported) == sum(c.tokens for c in sampled)
        assert len(reported) > 32
        crossed = [c for c in sampled if len(c.weight_versions) > 1]
        assert crossed, "every completion ended before the update"
        for completion in crossed:
            old, new = completion.weight_versions
            assert (old.version, new.version) == (UNVERSIONED, 1)
            assert 0 == old.start < old.end == new.start < new.end == completion.tokens
        report = await WeightUpdateClient(client).publish_report()
        assert (report.state, report.version, report.tensors) == ("whole", 1, len(manifest(policy)))
        assert report.buckets == len(lay_out(manifest(policy), BUCKET_BYTES)) > 3
        await client.call("POST", "/shutdown_weight_transfer_engine", {}, 30)


def test_vllm_start_has_a_seed_of_its_own(server: Server) -> None:
    """The log names what the seed follows from; that the workers are given it is part of a start."""
    assert re.search(
        r"^sampling seed: run 0, member '', start [0-9a-f]{32}$", server.log.read_text(), re.MULTILINE
    )


async def test_vllm_generates_while_a_member_is_slow_to_join(server: Server) -> None:
    """A change of membership waits for its slowest member; the others go on generating until all are there."""
    parts = 0

    def count(_: int, part: Part) -> None:
        nonlocal parts
        parts += 1

    async with VllmClient(server.url, TOKEN) as client:
        ask: dict[str, Any] = {"n": 1, "max_tokens": SPAN_LIMIT, "cache_salt": "join", "on_part": count}

        async def generate() -> None:
            while True:
                await client.stream([5, 6, 7], **ask)

        generating = [asyncio.create_task(generate()) for _ in range(4)]
        try:
            sender = Sender(20)
            joining = asyncio.create_task(WeightUpdateClient(client).init_group(sender.join()))
            await asyncio.sleep(0.5)  # the request has arrived
            before = parts
            async with asyncio.timeout(JOIN_SECONDS - 20):
                while parts < before + 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert not joining.done()
            await asyncio.gather(joining, asyncio.to_thread(sender.open))
            policy = new_weights(server.model, 20)
            await publish(client, sender, policy, 20)
            assert np.abs(await client.prompt_logprobs(PROBE) - score(policy, PROBE)).max() < 1e-4
        finally:
            for task in generating:
                task.cancel()
            await asyncio.gather(*generating, return_exceptions=True)


async def test_vllm_stream_equals_whole_answer(server: Server) -> None:
    ask: dict[str, Any] = {"n": 1, "max_tokens": SPAN_LIMIT, "temperature": 0.0}
    async with VllmClient(server.url, TOKEN) as client:
        parts: list[Part] = []
        (whole,) = await client.generate([5, 6, 7], **ask)
        await client.stream([5, 6, 7], **ask, on_part=lambda _, part: parts.append(part))
        assert [t for part in parts for t in part.token_ids] == whole.token_ids.tolist()
        np.testing.assert_allclose(
            np.concatenate([part.logprobs for part in parts]), whole.logprobs, atol=1e-5
        )
        last = parts[-1]
        assert isinstance(last, Sampled)
        assert (last.finish_reason, last.weight_versions) == (whole.finish_reason, whole.weight_versions)
        assert len(parts) <= 2 + len(whole.token_ids) // 64


LEASE = Lease(
    lease_id="l",
    prompt=PromptRef(0, Split.TRAIN, 0),
    slot=0,
    prompt_id="p",
    completions=16,
    max_tokens=SPAN_LIMIT,
    temperature=1.0,
    remaining_seconds=120.0,
    policy_version=6,
)


async def test_vllm_broken_streams_continue_as_one_completion(server: Server) -> None:
    """Log-probabilities are those of the whole sequence's, wherever the connection broke."""
    policy, prompt = new_weights(server.model, 6), [9, 8, 7]
    state, breaks = ServerState(), 0
    metrics = ActorMetrics(state, BusyClock())

    class Breaking(VllmClient):
        """A request's second part is lost with its connection, unless it is the last of its completion.

        By request, as one that breaks before it brings a token counts towards the attempts after which a lease fails.
        """

        async def stream(self, *given: Any, on_part: Callable[[int, Part], None], **options: Any) -> None:
            parts = 0

            def passed_on(index: int, part: Part) -> None:
                nonlocal parts, breaks
                parts += 1
                if parts >= 2 and not isinstance(part, Sampled):
                    breaks += 1
                    raise ServerDown("the connection breaks here")
                on_part(index, part)

            await super().stream(*given, on_part=passed_on, **options)

    async with Breaking(server.url, TOKEN) as client:
        sender = await connect(client, 6)
        await publish(client, sender, policy, 6)
        state.mark_up()
        state.complete_update(6)
        streams = CompletionStreams(
            *(
                client,
                ServerMonitor(client, state, metrics),
                state,
                metrics,
                LEASE,
                EncodedPrompt(prompt, b""),
            ),
            stop_token_ids=[1],
            max_sequences=64,
            on_tokens=lambda _: None,
        )
        await sample_plain(streams)
    # Not more: a busy machine has few, long parts.
    assert metrics.registry.get_sample_value("scalerl_actor_resubmitted_requests_total") == breaks > 1
    for completion in streams.completions:
        tokens = completion.token_ids.tolist()
        assert (tokens[-1] == 1) == (completion.finish_reason == "stop")
        assert 1 not in tokens[:-1]
        assert len(tokens) == SPAN_LIMIT or completion.finish_reason == "stop"
        assert completion.weight_versions == (Span(6, 0, len(tokens)),)
        expected = score(policy, prompt + tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_vllm_interrupted_completions_score_as_whole(server: Server) -> None:
    """The policy's tokens after the phrase have the log-probabilities that they have after these very tokens."""
    policy, prompt, phrase = new_weights(server.model, 7), [9, 8, 7], [20, 21, 22, 23]
    state = ServerState()
    metrics = ActorMetrics(state, BusyClock())

    async def texts(completions: list[NDArray[np.int32]]) -> list[str]:
        return ["" for _ in completions]

    strategy = ThoughtInterrupter(Interruption(5, 40, phrase), 0, texts, metrics)
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 7)
        await publish(client, sender, policy, 7)
        state.mark_up()
        state.complete_update(7)
        streams = CompletionStreams(
            *(client, ServerMonitor(client, state, metrics), state, metrics, LEASE),
            EncodedPrompt(prompt, b"", in_thought=True),
            stop_token_ids=[1],
            max_sequences=64,
            on_tokens=lambda _: None,
        )
        await strategy(streams)
    assert sum(c.has_forced for c in streams.completions) > 2
    for sample, completion in enumerate(streams.completions):
        start = strategy.position(LEASE, sample)
        tokens, policys = completion.token_ids.tolist(), np.ones(completion.tokens, dtype=bool)
        if completion.has_forced:
            assert tokens[start : start + 4] == phrase
            policys[start : start + 4] = False
            assert [(s.version, s.start) for s in completion.version_spans] == [
                (7, 0),
                (MASKED, start),
                (7, start + 4),
            ]
        else:
            assert len(tokens) <= start
        expected = score(policy, prompt + tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs[policys], expected[policys], atol=1e-4)
        assert not completion.logprobs[~policys].any()


async def test_vllm_logprobs_are_of_sampled_distribution(server: Server) -> None:
    policy = new_weights(server.model, 2)
    prompt = [9, 8, 7]
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 2)
        await publish(client, sender, policy, 2)
        for temperature in (1.0, 0.5):
            (sampled,) = await client.generate(
                prompt, n=1, max_tokens=40, temperature=temperature, cache_salt=f"2-{temperature}"
            )
            tokens = prompt + sampled.token_ids.tolist()
            with torch.no_grad():
                logits = policy(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1] / temperature
            expected = torch.log_softmax(logits, -1).gather(
                1, torch.from_numpy(sampled.token_ids).long()[:, None]
            )
            np.testing.assert_allclose(sampled.logprobs, expected[:, 0].numpy(), atol=1e-4)


async def test_vllm_cache_is_not_shared_between_weights(server: Server) -> None:
    """Also when a trainer returned to a checkpoint and publishes a version again with other weights."""
    prompt = PROBE * 5  # longer than a cache block, so that there is something to reuse
    state = ServerState()
    state.mark_up()
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 10)

        async def error_of_first_token(policy: LlamaForCausalLM, salt: str) -> float:
            (sampled,) = await client.generate(prompt, n=1, max_tokens=1, cache_salt=salt)
            truth = score(policy, [*prompt, int(sampled.token_ids[0])])[-1]
            return abs(float(sampled.logprobs[0] - truth))

        salts = []
        for seed, version in enumerate((10, 11, 10)):
            policy = new_weights(server.model, 10 + seed)
            await publish(client, sender, policy, version)
            state.complete_update(version)
            salts.append(state.cache_salt)
            assert await error_of_first_token(policy, state.cache_salt) < 1e-4
            assert await error_of_first_token(policy, state.cache_salt) < 1e-4  # of the cache of its own
        assert await error_of_first_token(policy, salts[0]) > 1e-3, (
            "an equal salt should have met the old cache"
        )


async def test_vllm_waiting_request_uses_new_weights(server: Server) -> None:
    """So its KV is the new weights', under the salt of the old: newer than the salt says, never older."""
    prompt = PROBE * 5
    old, new = new_weights(server.model, 14), new_weights(server.model, 15)
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 14)
        await publish(client, sender, old, 14)
        await client.pause()
        waiting = asyncio.create_task(client.generate(prompt, n=1, max_tokens=2, cache_salt="old"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await publish(client, sender, new, 15)  # pauses once more, and resumes
        (sampled,) = await waiting
        assert [span.version for span in sampled.weight_versions] == [15]
        ids = sampled.token_ids.tolist()  # by chance the first one ends it
        truth = score(new, [*prompt, *ids])[-len(ids) :]
        assert np.abs(sampled.logprobs - truth).max() < 1e-4, (
            "its prompt was read with the weights that it found"
        )


async def test_vllm_update_fails_fast_on_killed_sender(server: Server) -> None:
    policy = new_weights(server.model, 3)
    rows = [[t.name, t.dtype, t.shape] for t in manifest(policy)]
    doomed = start_doomed_sender(epoch=3, version=3)
    assert doomed.stdin is not None
    assert doomed.stdout is not None
    try:
        doomed.stdin.write(json.dumps(rows) + "\n")
        doomed.stdin.flush()
        port = int(await asyncio.to_thread(doomed.stdout.readline))
        async with VllmClient(server.url, TOKEN) as client:
            join = Sender(3).join()
            await WeightUpdateClient(client).init_group(
                GroupJoin(**{f: getattr(join, f) for f in join.__struct_fields__} | {"store_port": port})
            )
            update = asyncio.create_task(WeightUpdateClient(client).install(receive(policy, 3, 3)))
            assert await asyncio.to_thread(doomed.stdout.readline) == "sent\n"
            await asyncio.sleep(0.2)
            assert not update.done()
            doomed.kill()
            died = time.monotonic()
            with pytest.raises(UpdateFailed, match="1 bucket") as failed:
                await update
            assert time.monotonic() - died < JOIN_SECONDS / 2
            assert failed.value.partial

            stuck = asyncio.create_task(client.generate([5], n=1, max_tokens=2, cache_salt="3"))
            await asyncio.sleep(0.3)
            assert not stuck.done(), "a mixture of weights must not generate"
            sender = await connect(client, 4)
            await publish(client, sender, policy, 4)
            assert (await stuck)[0].weight_versions[0].version == 4
            assert np.abs(await client.prompt_logprobs(PROBE) - score(policy, PROBE)).max() < 1e-4
    finally:
        doomed.kill()
        doomed.wait(120)
        doomed.stdin.close()
        doomed.stdout.close()


async def test_vllm_update_times_out_on_silent_sender(server: Server) -> None:
    policy = new_weights(server.model, 5)
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 5)
        await publish(client, sender, policy, 5)
        started = time.monotonic()
        with pytest.raises(UpdateFailed, match="0 bucket") as failed:
            await WeightUpdateClient(client).install(receive(policy, 5, 6, timeout_seconds=1))
        assert 0.9 < time.monotonic() - started < JOIN_SECONDS / 2
        assert not failed.value.partial
        assert await weight_version(client) == "5"
        assert np.abs(await client.prompt_logprobs(PROBE) - score(policy, PROBE)).max() < 1e-4


@pytest.mark.parametrize(("bucket", "partial"), [(0, False), (2, True)])
async def test_vllm_update_refuses_damaged_bytes(server: Server, bucket: int, partial: bool) -> None:
    good, bad = new_weights(server.model, 6), new_weights(server.model, 7)
    epoch = 60 + 2 * bucket
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, epoch)
        await publish(client, sender, good, epoch)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, bad, epoch + 1, bucket))
        with pytest.raises(UpdateFailed, match=f"bucket {bucket} .*checksum mismatch") as failed:
            await WeightUpdateClient(client).install(receive(bad, epoch, epoch + 1))
        assert failed.value.partial == partial
        with pytest.raises(RuntimeError):  # the receiver left, so the sender's next broadcast fails too
            await sending
        sender = await connect(client, epoch + 1)
        await publish(client, sender, good, epoch + 1)
        assert np.abs(await client.prompt_logprobs(PROBE) - score(good, PROBE)).max() < 1e-4


@pytest.mark.full
async def test_vllm_tensor_parallel_workers_recover_together(two_workers: Server) -> None:
    """vLLM takes a worker's answer to a call that failed for its answer to the next one."""
    good, bad = new_weights(two_workers.model, 6), new_weights(two_workers.model, 7)
    async with VllmClient(two_workers.url, TOKEN) as client:
        with pytest.raises(ServerRefused):  # the other side is not opened
            await WeightUpdateClient(client).init_group(Sender(1, workers=2).join(timeout_seconds=1))
        for epoch, bucket in ((2, 0), (4, 2)):
            sender = await connect(client, epoch, workers=2)
            await publish(client, sender, good, epoch)
            sending = asyncio.create_task(asyncio.to_thread(sender.send, bad, epoch + 1, bucket))
            with pytest.raises(UpdateFailed, match=f"bucket {bucket} .*checksum mismatch") as failed:
                await WeightUpdateClient(client).install(receive(bad, epoch, epoch + 1))
            assert failed.value.partial == (bucket > 0)
            with pytest.raises(RuntimeError):
                await sending
        await client.call("POST", "/start_weight_update", {}, 10)  # and its client dies
        sender = await connect(client, 6, workers=2)
        with pytest.raises(UpdateFailed, match="not in a process group"):
            await WeightUpdateClient(client).install(receive(good, 6, 6))
        sender = await connect(client, 7, workers=2)
        await publish(client, sender, good, 7)
        assert np.abs(await client.prompt_logprobs(PROBE) - score(good, PROBE)).max() < 1e-4
        writer = weight_writer(two_workers)
        for version, policy in ((8, bad), (9, good)):
            await publish_files(client, writer, policy, version)
            assert np.abs(await client.prompt_logprobs(PROBE) - score(policy, PROBE)).max() < 1e-4


async def test_vllm_update_takes_over_open_update(server: Server) -> None:
    policy = new_weights(server.model, 8)
    async with VllmClient(server.url, TOKEN) as client:
        await client.pause()
        await client.call("POST", "/start_weight_update", {}, 10)
        sender = await connect(client, 80)
        with pytest.raises(UpdateFailed, match="not in a process group"):  # taking over leaves the group
            await WeightUpdateClient(client).install(receive(policy, 80, 80))
        sender = await connect(client, 81)
        await publish(client, sender, policy, 81)
        assert np.abs(await client.prompt_logprobs(PROBE) - score(policy, PROBE)).max() < 1e-4


async def test_vllm_worker_refuses_bad_requests(server: Server) -> None:
    policy = new_weights(server.model, 9)
    async with VllmClient(server.url, TOKEN) as client:
        sender = Sender(90)
        with pytest.raises(ServerRefused):  # the other side is not opened
            await WeightUpdateClient(client).init_group(sender.join(timeout_seconds=1))
        sender = await connect(client, 91)
        with pytest.raises(UpdateFailed, match="epoch 91: join the group"):
            await WeightUpdateClient(client).install(receive(policy, 92, 92))
    async with VllmClient(server.url, "another token") as stranger:
        with pytest.raises(ServerRefused, match="401"):
            await stranger.pause()


def test_vllm_nccl_group_survives_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads how a group reacts to a lost peer when the group is constructed: by default it ends the process."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    found: list[str | None] = []

    class NoGpu(torch.distributed.ProcessGroupNCCL):
        def __init__(self, *_: object) -> None:
            found.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
            raise RuntimeError("no GPUs found")

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NoGpu)
    monkeypatch.setattr(ReceiverGroup, "_device_of_thread", lambda _: contextlib.nullcontext())
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    init = GroupJoin(
        epoch=1,
        store_host="127.0.0.1",
        store_port=store.port,
        rank=1,
        world_size=2,
        backend="nccl",
        timeout_seconds=120.0,
    )
    group = ReceiverGroup(init, 1, torch.device("cpu"))
    while (problem := group.problem()) is None:
        time.sleep(0.01)
    assert "no GPUs found" in problem
    assert found == ["2"]  # CleanUpOnly


async def takes_bf16_weights(server: Server) -> None:
    """As close to the float32 forward as a bf16 forward of transformers is, within a factor of two."""
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 1)
        for version in (1, 2):
            policy = new_weights(server.model, version).to(torch.bfloat16)
            await publish(client, sender, policy, version)
            scored = await client.prompt_logprobs(PROBE)
            in_bf16 = score(policy, PROBE)
            exact = score(policy.float(), PROBE)
            rounding = np.abs(in_bf16 - exact)
            error = np.abs(scored - exact)
            assert error.mean() < 2 * rounding.mean()
            assert error.max() < 2 * rounding.max()


async def test_vllm_update_of_bf16_model(bf16_server: Server) -> None:
    await takes_bf16_weights(bf16_server)


def cut_off(writer: WeightWriter) -> None:
    for path in Path(str(writer.folder)).iterdir():
        path.write_bytes(path.read_bytes()[:-1])


def slightly_changed(policy: LlamaForCausalLM, seed: int) -> None:
    """One weight of a hundred becomes a neighbouring bfloat16."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.view(torch.int16).add_((torch.rand(parameter.shape, generator=random) < 0.01).short())


async def test_vllm_updates_from_files(bf16_server: Server) -> None:
    """Exact beside a broadcast of the same weights; what is read for the next version leaves the present one as it is."""
    writer = weight_writer(bf16_server)
    policy = new_weights(bf16_server.model, 1).to(torch.bfloat16)
    async with VllmClient(bf16_server.url, TOKEN) as client:
        whole = await publish_files(client, writer, policy, 1)
        published = asyncio.Event()

        async def sampled() -> list[Sampled]:
            """Until the last version: on a slow machine the completions of one request end before the first."""
            found: list[Sampled] = []
            while not published.is_set():
                found += await client.generate([5, 6, 7], n=4, max_tokens=SPAN_LIMIT, cache_salt="0")
            return found

        in_flight = asyncio.create_task(sampled())
        await asyncio.sleep(0.1)
        for version in (2, 3, 4):
            slightly_changed(policy, version)
            if version == 3:  # it misses this one
                write(writer, policy, version)
            else:
                changes = await publish_files(client, writer, policy, version)
                assert 0 < changes.bytes < whole.bytes / 10
        published.set()
        assert changes.path == whole.path
        assert any(len(one.weight_versions) > 1 for one in await in_flight)
        assert await weight_version(client) == "4"
        from_files = await client.prompt_logprobs(PROBE)

        sender = await connect(client, 5)
        await publish(client, sender, policy, 5)
        assert np.array_equal(await client.prompt_logprobs(PROBE), from_files)

        other = new_weights(bf16_server.model, 2).to(torch.bfloat16)
        request = write(writer, other, 6)
        fetched = await WeightUpdateClient(client).fetch(request)
        assert np.array_equal(await client.prompt_logprobs(PROBE), from_files)
        await WeightUpdateClient(client).install(request, fetched)
        assert np.abs(await client.prompt_logprobs(PROBE) - from_files).max() > 0.1

        slightly_changed(other, 7)
        request = write(writer, other, 7)
        cut_off(writer)
        with pytest.raises(ServerRefused, match=r"0000000[67]: it is cut off"):
            await WeightUpdateClient(client).fetch(request)
        with pytest.raises(UpdateFailed, match="the copy in memory has version") as failed:
            await WeightUpdateClient(client).install(request, fetched)
        assert not failed.value.partial
        assert await weight_version(client) == "6"
        assert len(await client.generate([5, 6, 7], n=1, max_tokens=4, cache_salt="0")) == 1


@pytest.mark.full
@pytest.mark.parametrize(("tied", "fp32_head"), [(False, True), (True, False)])
async def test_vllm_update_of_other_bf16_models(tmp_path: Path, tied: bool, fp32_head: bool) -> None:
    servers = start_server(tmp_path, tied=tied, dtype="bfloat16", fp32_head=fp32_head)
    server = await asyncio.to_thread(next, servers)
    try:
        await takes_bf16_weights(server)
    finally:
        await asyncio.to_thread(servers.close)  # type: ignore[attr-defined]


def engine_of(server: Server) -> int:
    """The engine's process id: the server's one child."""
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def environment_of(pid: int) -> bytes:
    """As other processes see it; empty for an ended process or a zombie."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not environment_of(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def generate_until_failed(client: VllmClient) -> None:
    """Some may be answered before the server dies; others must fail."""
    answers = list[Any]()
    while not any(isinstance(answer, VllmError) for answer in answers):
        calls = [client.generate([5, 6, 7 + i], n=4, max_tokens=SPAN_LIMIT) for i in range(40)]
        answers = await asyncio.gather(*calls, return_exceptions=True)


# The last two tests end the servers of this file.


async def test_vllm_engine_dies_with_server(server: Server) -> None:
    engine = engine_of(server)
    assert environment_of(engine) == environment_of(server.process.pid), "orphans are known by it"
    async with VllmClient(server.url, TOKEN) as client:
        working = asyncio.create_task(generate_until_failed(client))
        await asyncio.sleep(0.5)
        server.process.kill()
        server.process.wait(120)
        assert await ended(engine, 120)
        await working
        with socket.socket() as s:  # no process listens any more
            assert s.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0


async def test_vllm_server_exits_with_dead_engine(bf16_server: Server) -> None:
    async with VllmClient(bf16_server.url, TOKEN) as client:
        working = asyncio.create_task(generate_until_failed(client))
        await asyncio.sleep(0.5)
        os.kill(engine_of(bf16_server), signal.SIGKILL)
        await working
    await asyncio.to_thread(bf16_server.process.wait, 120)
    log = bf16_server.log.read_text()
    assert "EngineDeadError" in log
    assert len(log.splitlines()) < 100, "an error for each request in flight, with its stack"
