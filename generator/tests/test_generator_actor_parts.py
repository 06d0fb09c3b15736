"""Units of the actor: number of leases, tokens and text, clocks, state."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import resource
import time
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
from actor_stand_ins import CHARACTERS, END, TOKEN, CoordinatorStandIn, until, write_run, write_tokenizer
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.load import load_run
from scalerl_api.spec import PromptSpec
from scalerl_api.wire import MASKED, Group, PromptRef, Sample, Split, Verdicts
from scalerl_generator.actor import raise_open_files_limit
from scalerl_generator.actor_api import actor_runner
from scalerl_generator.coordinator_client import CoordinatorClient
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration
from scalerl_generator.rollouts.delivery import Delivery
from scalerl_generator.rollouts.group_packing import group_verdicts, sample_of
from scalerl_generator.rollouts.occupancy import Occupancy, groups_wanted
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import PromptCodec, PromptTooLong
from scalerl_generator.rollouts.task_runtimes import open_graders
from scalerl_generator.server_state import NO_WEIGHTS, BusyClock, ServerState
from scalerl_generator.vllm_replies import Part, Span
from scalerl_tasks import Graded, GradingError, Verdict
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sources import open_tasks

# --- how much work ----------------------------------------------------------------------------


@given(
    capacity=st.integers(1, 2048),
    per_group=st.integers(1, 64),
    share=st.floats(0.2, 1.0),
    groups=st.integers(0, 300),
)
def test_groups_wanted_fills_server_with_bounded_surplus(
    capacity: int, per_group: int, share: float, groups: int
) -> None:
    wanted = groups_wanted(capacity, per_group, share, at_server=groups * per_group, in_hand=groups)
    total = groups + wanted
    running = total * per_group * share  # sequences expected to be growing
    assert wanted >= 0
    assert running >= capacity - 1e-6 or (wanted == 0 and groups >= 1), (
        "the server has room and work is not asked for"
    )
    if wanted:
        assert running <= max(capacity * 1.125, capacity + per_group * share) + 1e-6, "a hoard"


@given(capacity=st.integers(1, 2048), per_group=st.integers(1, 64), share=st.floats(0.2, 1.0))
def test_groups_wanted_stops_while_groups_are_held(capacity: int, per_group: int, share: float) -> None:
    first = groups_wanted(capacity, per_group, share, at_server=0, in_hand=0)
    assert first >= 1
    assert groups_wanted(capacity, per_group, share, at_server=0, in_hand=2 * first + 1) == 0


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=32), max_size=50))
def test_occupancy_is_bounded(groups: list[list[int]]) -> None:
    occupancy = Occupancy()
    for lengths in groups:
        occupancy.observe(lengths)
        assert 0.2 <= occupancy.fraction <= 1.0


# --- tokens and text --------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in text]


def test_codec_round_trip(model: Path) -> None:
    codec = PromptCodec(model, PromptSpec(template="{prompt}="), context_tokens=16)
    encoded = codec.encode(Prompt(id="p", text="1+2", answer="3"), max_tokens=8)
    assert encoded.token_ids == ids("1+2=")
    assert np.frombuffer(encoded.wire, "<i4").tolist() == encoded.token_ids
    assert not encoded.in_thought
    assert (
        PromptCodec(model, PromptSpec(template="{prompt}<think>"), 16)
        .encode(Prompt(id="p", text="1+2", answer="3"), 1)
        .in_thought
    )
    completions = [[*ids("3"), END], ids("34"), [END], []]
    assert codec.texts([np.array(c, dtype=np.int32) for c in completions]) == ["3", "34", "", ""]


def test_group_verdicts_are_columns() -> None:
    graded = [
        Graded(Verdict(1.0, {"outcome": 1.0, "process": 0.5})),
        Graded(None, "grading took longer than 1 s and was killed"),
        Graded(Verdict(0.0, {"outcome": 0.0, "process": -2.0})),
    ]
    verdicts = group_verdicts(graded, ("outcome", "process"))
    assert verdicts == Verdicts(
        scores=[1.0, 0.0, 0.0],
        parts={"outcome": [1.0, 0.0, 0.0], "process": [0.5, 0.0, -2.0]},
        errors={1: "grading took longer than 1 s and was killed"},
    )
    assert verdicts.ungraded == [1]
    assert group_verdicts([Graded(Verdict(1.0))], ()) == Verdicts(scores=[1.0])
    verdicts = [Graded(Verdict(0.0, answered=answered)) for answered in (True, False, None)]
    assert group_verdicts([*verdicts, graded[1]], ()).unanswered == [1]
    assert group_verdicts(verdicts[:1], ()).unanswered == []


def test_sample_explains_a_group_of_equal_scores() -> None:
    prompt = Prompt("p", "?", "5")
    wrong, right, failed = Graded(Verdict(0.0)), Graded(Verdict(1.0)), Graded(None, "too slow")
    texts = ["It is <answer> 5. </answer>", "b", "c"]
    assert sample_of(prompt, texts, [wrong, right, wrong]) is None
    assert sample_of(prompt, texts, [failed] * 3) is None
    found = sample_of(prompt, texts, [wrong, failed, wrong])
    assert found == Sample(prompt_id="p", reply=texts[0], answer="5.", reference="5", score=0.0)
    second = sample_of(prompt, texts, [failed, right, right])
    assert second is not None
    assert (second.reply, second.score) == ("b", 1.0)


@given(st.text(st.characters(), max_size=900))
def test_sample_of_any_text_is_bounded_and_can_be_sent(text: str) -> None:
    """Lone surrogates, megabytes, control characters: the push must not fail because of a reply."""
    found = sample_of(Prompt("i" * 5000, "?", text * 9), [text * 50], [Graded(Verdict(0.0))])
    assert found is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Sample) == found
    assert len(found.reply) <= 400
    assert max(map(len, (found.prompt_id, found.answer, found.reference))) <= 200


def test_version_spans_separate_masked_tokens() -> None:
    def spans(masked: list[int]) -> list[tuple[int, int]]:
        completion = PartialCompletion()
        completion.append(
            Part(np.zeros(6, np.int32), np.zeros(6, np.float32), np.isin(np.arange(6), masked)), 4
        )
        completion.settle(0, (Span(4, 0, 2), Span(5, 2, 6)))
        return [(span.version, span.start) for span in completion.version_spans]

    assert spans([]) == [(4, 0), (5, 2)]
    assert spans([1, 2]) == [(4, 0), (MASKED, 1), (5, 3)]
    assert spans([0, 4]) == [(MASKED, 0), (4, 1), (5, 2), (MASKED, 4), (5, 5)]
    assert spans([0, 1, 2, 3, 4, 5]) == [(MASKED, 0)]


def test_encode_refuses_too_long_prompt(model: Path) -> None:
    codec = PromptCodec(model, PromptSpec(), context_tokens=16)
    codec.encode(Prompt(id="p", text="12345678", answer=""), 8)
    with pytest.raises(PromptTooLong, match=r"'long' has 9 tokens.*at least 17"):
        codec.encode(Prompt(id="long", text="123456789", answer=""), 8)


# --- state ------------------------------------------------------------------------------------


async def test_serving_waits_for_complete_weights() -> None:
    server = ServerState()
    waiting = asyncio.create_task(server.serving())
    server.mark_up()
    server.begin_update()
    server.complete_update(4)
    server.begin_update()
    await asyncio.sleep(0)
    assert not waiting.done(), "an update has begun again before anybody looked"
    server.fail_update(weights_whole=True)
    assert await waiting == 4
    server.begin_update()
    server.fail_update(weights_whole=False)
    assert (server.version, server.is_serving) == (NO_WEIGHTS, False)
    server.complete_update(5)
    assert await server.serving() == 5
    salt = server.cache_salt
    server.begin_update()
    server.fail_update(weights_whole=True)
    assert server.cache_salt == salt, "the same weights"
    server.complete_update(5)
    assert server.cache_salt != salt, "the same version again, perhaps of another line of training"
    assert salt.startswith("5.")
    assert server.has_held(4)
    server.mark_down()
    server.complete_update(6)
    assert server.version == NO_WEIGHTS, "an update that ends after its server is not one"
    server.mark_up()
    assert not server.has_held(5), "a new life, other weights"


# --- delivery ---------------------------------------------------------------------------------


async def test_delivery_batches_groups_and_survives_registration() -> None:
    coordinator = CoordinatorStandIn(heartbeat_seconds=60.0)
    await coordinator.start()
    server, busy = ServerState(), BusyClock()
    server.mark_up()
    metrics = ActorMetrics(server, busy)
    coordinator.offer(3, ["p"])
    coordinator.leased = {lease.lease_id: lease for lease in coordinator.todo}
    coordinator.todo.clear()
    async with aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, coordinator.url, TOKEN)
        membership = Registration(client, server, busy, metrics, name="generator-0", control_url="http://h:1")
        delivery = Delivery(client, membership, metrics)
        loops = [asyncio.create_task(membership.run("digest")), asyncio.create_task(delivery.run())]
        await until(lambda: membership.member_id == "m1" and coordinator.beats)
        coordinator.members.clear()  # the next heartbeat is far away: the push finds out
        for lease_id in coordinator.leased:
            membership.held_leases.add(lease_id)
            delivery.put(empty_group(lease_id), time.monotonic() + 30.0)
        assert await delivery.flush(10.0)
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
    await coordinator.kill()
    assert membership.member_id == "m2"
    assert [len(push.groups) for push in coordinator.pushes] == [3]
    assert not membership.held_leases


def empty_group(lease_id: str) -> Group:
    return Group(
        lease_id=lease_id,
        prompt=PromptRef(0, Split.TRAIN, 0),
        slot=0,
        prompt_id="p",
        prompt_token_ids=b"",
        completions=[],
        verdicts=Verdicts(scores=[]),
        generation_seconds=0.0,
    )


def test_open_files_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65535, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_runner_does_not_decompress_bodies() -> None:
    async def sent(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/", sent)
    runner = actor_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    packed, headers = gzip.compress(bytes(2**20)), {"Content-Encoding": "gzip"}
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            async with session.post(url, data=io.BytesIO(packed), headers=headers) as answer:
                assert await answer.read() == packed
    finally:
        await runner.cleanup()


async def test_actor_refuses_a_reward_that_is_edited_while_it_starts(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(completion): return 1.0\n")
    write_run(
        tmp_path,
        ["a", "b", "c", "d", "e"],
        task__verifier={"python": {"path": str(reward), "function": "score"}},
    )
    spec = load_run(tmp_path / "run.yaml").spec
    tasks = open_tasks(spec)
    async with contextlib.AsyncExitStack() as stack:
        (pool,) = await open_graders(stack, spec, tasks)
        assert (await pool.score_group(tasks.tasks[0].train[0], ["a"]))[0].score == 1.0
        reward.write_text("def score(completion): return 0.0\n")
        with pytest.raises(GradingError, match="was edited while the actor started"):
            await open_graders(stack, spec, tasks)
