"""The teacher's client and the actor, against a small server that can be another model's, away, or wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from actor_stand_ins import (
    END,
    CoordinatorStandIn,
    Generator,
    TrainerSide,
    until,
    write_run,
    write_tokenizer,
)
from aiohttp import web
from free_port import free_port
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_api.recipe import TeacherSpec
from scalerl_api.spec import PromptSpec
from scalerl_api.wire import Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts import teacher as teacher_module
from scalerl_generator.rollouts.teacher import API_KEY, Teacher, Timings, UnfitTeacher
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_replies import GenerationFailed, Sampled, ServerRefused
from scalerl_tasks.sources import open_task
from scalerl_tasks.tokenizer import ModelTokenizer

CONTEXT = 64


@dataclass
class TeacherStandIn:
    """The part of vLLM's API that the client uses; token ``i`` of a sequence has the log-probability -i / 8."""

    model: Path
    """Folder with its tokenizer."""
    context: int = CONTEXT + 1
    key: str = ""
    status: int = 200
    """Of every answer about log-probabilities."""
    poison: int | None = None
    """A token; sequences with it are refused."""
    poison_status: int = 500
    port: int = field(default_factory=free_port)
    scored: list[dict[str, Any]] = field(default_factory=list)
    logprob: float | None = None
    missing: tuple[int, ...] = ()
    """Positions whose log-probability is null."""
    answering: asyncio.Event | None = None
    """Answers about log-probabilities wait for it."""
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        for path, handler in (
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            ("/v1/completions", self._score),
        ):
            app.router.add_post(path, handler)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def kill(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.model / "tokenizer.json"))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "large"}, {"id": "larger"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return web.json_response({"count": len(ids), "max_model_len": self.context, "tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        return web.json_response({"prompt": self._tokenizer.decode(ids, skip_special_tokens=False)})

    async def _score(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.scored.append(body)
        if self.answering is not None:
            await self.answering.wait()
        status = self.poison_status if self.poison in body["prompt"] else self.status
        if status != 200:
            return web.json_response({"error": {"message": "not now"}}, status=status)
        rows: list[Any] = [None]
        for i, token in enumerate(body["prompt"][1:], start=1):
            logprob = -i / 8 if self.logprob is None else self.logprob
            rows.append({str(token): {"logprob": None if i in self.missing else logprob}})
        return web.json_response({"choices": [{"index": 0, "text": "", "prompt_logprobs": rows}]})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "student")
    return tmp_path / "student"


@pytest.fixture
async def server(model: Path) -> AsyncIterator[TeacherStandIn]:
    standing = TeacherStandIn(model)
    await standing.start()
    yield standing
    await standing.kill()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest.fixture
def metrics() -> ActorMetrics:
    return ActorMetrics(ServerState(), BusyClock())


@pytest.fixture
def teacher(server: TeacherStandIn, session: aiohttp.ClientSession, metrics: ActorMetrics) -> Teacher:
    timings = Timings(max_backoff_seconds=0.02, progress_seconds=0.05)
    return Teacher(session, TeacherSpec(url=server.url), "", metrics, timings)


def tokenizer_of(model: Path) -> ModelTokenizer:
    return ModelTokenizer(model, PromptSpec())


def sampled(*ids: int, masked: tuple[int, ...] = ()) -> Sampled:
    mask = np.isin(np.arange(len(ids)), masked)
    return Sampled(np.array(ids, np.int32), np.zeros(len(ids), np.float32), mask, (), "stop")


# --- whether it fits --------------------------------------------------------------------------


async def test_teacher_of_the_same_tokenizer_fits(
    server: TeacherStandIn, session: aiohttp.ClientSession, metrics: ActorMetrics, model: Path
) -> None:
    server.key = "secret"
    named = Teacher(session, TeacherSpec(url=f"{server.url}/", model="larger"), "secret", metrics)
    await named.check(tokenizer_of(model), CONTEXT)
    await named.score([3], [sampled(4)], lambda: None)
    first = Teacher(session, TeacherSpec(url=server.url), "secret", metrics)
    await first.check(tokenizer_of(model), CONTEXT)
    await first.score([3], [sampled(4)], lambda: None)
    assert [body["model"] for body in server.scored] == ["larger", "large"]


def another(change: str, vocabulary: dict[str, int], added: list[dict[str, Any]]) -> None:
    if change == "exchanged":
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    elif change == "unprobed":  # one that no probe has, and encodes nothing else otherwise
        vocabulary["~"] = vocabulary.pop("|")
    elif change == "special":
        added[1]["content"] = "<end>"
        vocabulary["<end>"] = vocabulary.pop("<eos>")
    else:
        vocabulary["~"] = len(vocabulary)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("exchanged", r"'The quick .* there and .* here"),
        ("unprobed", "tokens 0 to .* have other texts"),
        ("special", "'<pad><eos>' is"),
        ("more", "the student has 58 tokens, and the teacher more: '~'"),
    ],
)
async def test_teacher_of_another_tokenizer_is_refused(
    server: TeacherStandIn, teacher: Teacher, model: Path, tmp_path: Path, change: str, says: str
) -> None:
    write_tokenizer(tmp_path / "teacher")
    server.model = tmp_path / "teacher"
    file = server.model / "tokenizer.json"
    content = json.loads(file.read_text())
    another(change, content["model"]["vocab"], content["added_tokens"])
    file.write_text(json.dumps(content))
    with pytest.raises(UnfitTeacher, match=says) as refused:
        await teacher.check(tokenizer_of(model), CONTEXT)
    assert f"recipe.distillation.teacher ({server.url}) has another tokenizer than model" in str(
        refused.value
    )


async def test_teacher_with_too_short_a_context_is_refused(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> None:
    server.context = CONTEXT
    with pytest.raises(UnfitTeacher, match=r"max_model_len of 64, .* more than model.contextTokens \(64\)"):
        await teacher.check(tokenizer_of(model), CONTEXT)


async def test_teacher_that_refuses_the_check_is_refused(
    server: TeacherStandIn, session: aiohttp.ClientSession, metrics: ActorMetrics, model: Path
) -> None:
    server.key = "secret"
    cases = [
        (TeacherSpec(url=server.url), "wrong", f"401: .*that is the variable {API_KEY}"),
        (
            TeacherSpec(url=server.url, model="small"),
            "secret",
            r"serves \['large', 'larger'\], not .*model \(small\)",
        ),
        (TeacherSpec(url=f"{server.url}/v1"), "secret", r"404.*url without /v1"),
    ]
    for spec, key, says in cases:
        teacher = Teacher(session, spec, key, metrics)
        with pytest.raises(UnfitTeacher, match=says):
            await teacher.check(tokenizer_of(model), CONTEXT)


async def test_check_waits_for_a_teacher_that_is_not_up_yet(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> None:
    await server.kill()
    checking = asyncio.create_task(teacher.check(tokenizer_of(model), CONTEXT))
    await until(lambda: teacher.problem)
    assert server.url in teacher.problem
    await server.start()
    await asyncio.wait_for(checking, 120)
    assert teacher.problem == ""


# --- scores -----------------------------------------------------------------------------------


async def test_score_is_of_the_completions_tokens(server: TeacherStandIn, teacher: Teacher) -> None:
    found = await teacher.score([5, 6, 7], [sampled(8, 9), sampled(8, 4, END, masked=(1,))], lambda: None)
    assert [logprobs.dtype for logprobs in found] == [np.float32] * 2
    # The prompt has positions 0 to 2.
    assert [logprobs.tolist() for logprobs in found] == [[-3 / 8, -4 / 8], [-3 / 8, 0.0, -5 / 8]]
    assert [body["prompt"] for body in server.scored] == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 4, END]]


async def test_score_requires_a_logprob_of_trained_tokens_only(
    server: TeacherStandIn, teacher: Teacher
) -> None:
    completion = sampled(8, 4, END, masked=(1,))
    server.missing = (1, 2, 4)
    (found,) = await teacher.score([5, 6, 7], [completion], lambda: None)
    assert found.dtype == np.float32
    assert found.tolist() == [-3 / 8, 0.0, -5 / 8]
    for position in (3, 5):
        server.missing = (position,)
        with pytest.raises(GenerationFailed, match="no finite log-probability"):
            await teacher.score([5, 6, 7], [completion], lambda: None)


async def test_actor_asks_for_a_bounded_number_of_scores_at_once(
    server: TeacherStandIn, teacher: Teacher
) -> None:
    server.answering = asyncio.Event()
    scoring = asyncio.create_task(teacher.score([5], [sampled(6)] * 40, lambda: None))
    await until(lambda: len(server.scored) >= 16)
    await asyncio.sleep(0.2)
    assert len(server.scored) == 16
    server.answering.set()
    assert len(await scoring) == 40


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_score_waits_for_a_teacher_that_answers_nobody(
    server: TeacherStandIn,
    session: aiohttp.ClientSession,
    metrics: ActorMetrics,
    status: int,
) -> None:
    timings = Timings(progress_seconds=0.05)
    teacher = Teacher(session, TeacherSpec(url=server.url), "", metrics, timings)
    waited: list[str] = []
    server.status = status
    scoring = asyncio.create_task(teacher.score([5], [sampled(6)], lambda: waited.append(teacher.problem)))
    await until(lambda: len(server.scored) > 1 and len(waited) > 5)  # the lease is kept alive
    assert not scoring.done()
    assert f"HTTP {status}: not now" in teacher.problem
    server.status = 200
    assert [logprobs.tolist() for logprobs in await scoring] == [[-1 / 8]]
    assert teacher.problem == ""
    text = metrics.text().decode()
    assert "scalerl_actor_teacher_tokens_total 1.0" in text
    # The last two that were asked for are a probe, and the completion.
    assert f"scalerl_actor_teacher_failures_total {len(server.scored) - 2}.0" in text
    assert [body["prompt"] for body in server.scored[-2:]] == [[5, 5], [5, 6]]
    count = len(waited)
    await asyncio.sleep(0.2)
    assert len(waited) == count


async def test_score_that_only_one_completion_is_refused_for_raises(
    server: TeacherStandIn, teacher: Teacher
) -> None:
    server.status = 400
    with pytest.raises(ServerRefused, match="not now"):
        await teacher.score([5], [sampled(6)], lambda: None)
    server.status, server.logprob = 200, -9999.0
    with pytest.raises(GenerationFailed, match="no finite log-probability"):
        await teacher.score([5], [sampled(6)], lambda: None)
    assert teacher.problem == ""


async def test_score_waits_for_a_teacher_with_too_short_context(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> None:
    await teacher.check(tokenizer_of(model), CONTEXT)
    server.context, server.poison, server.poison_status = CONTEXT, 9, 400
    scoring = asyncio.create_task(teacher.score([5], [sampled(9)], lambda: None))
    await until(lambda: len(server.scored) > 1)
    await teacher.score([5], [sampled(6)], lambda: None)
    await until(lambda: len(server.scored) > 20)
    assert not scoring.done()
    assert teacher.problem.startswith(
        f"recipe.distillation.teacher ({server.url}) has a max_model_len of {CONTEXT}"
    )
    server.context = CONTEXT + 1
    with pytest.raises(ServerRefused, match="not now"):
        await asyncio.wait_for(scoring, 120)
    assert teacher.problem == ""


async def test_completion_that_fails_while_others_are_answered_raises(
    server: TeacherStandIn, teacher: Teacher
) -> None:
    """Also where as many fail as the teacher scores at once."""
    server.poison, server.status = 9, 503
    requests = teacher_module._REQUESTS
    poisoned = [asyncio.create_task(teacher.score([5], [sampled(9)], lambda: None)) for _ in range(requests)]
    other = asyncio.create_task(teacher.score([5], [sampled(6)], lambda: None))
    await until(lambda: len(server.scored) > 20 * requests)
    assert not any(task.done() for task in [*poisoned, other]), "the teacher answers no request"
    server.status = 200
    await asyncio.wait_for(other, 120)
    for failed in await asyncio.wait_for(asyncio.gather(*poisoned, return_exceptions=True), 120):
        assert isinstance(failed, ServerRefused)
        assert failed.status == 500
    assert teacher.problem == ""


async def test_only_completion_left_raises_when_the_teacher_answers_probes(
    server: TeacherStandIn, teacher: Teacher
) -> None:
    server.poison = 9
    with pytest.raises(ServerRefused, match="HTTP 500"):
        await asyncio.wait_for(teacher.score([5, 6], [sampled(9)], lambda: None), 120)
    attempts = [body["prompt"] for body in server.scored]
    # The first failure says nothing of the completion; each later one comes after a probe of the same length.
    assert attempts == [[5, 6, 9]] + [[5, 5, 5], [5, 6, 9]] * teacher_module._MAX_FAILURES
    assert teacher.problem == ""


async def test_completion_is_not_given_up_while_the_teacher_fails_on_probes(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> None:
    """A teacher out of memory for so many tokens fails on a probe of as many, whatever it answers for shorter ones."""
    await teacher.check(tokenizer_of(model), CONTEXT)
    server.status = 500
    scoring = asyncio.create_task(teacher.score([5], [sampled(6)], lambda: None))
    await until(lambda: len(server.scored) > 40)
    assert not scoring.done()
    server.status = 200
    await asyncio.wait_for(scoring, 120)


async def scoring_during_an_outage(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> asyncio.Task[list[NDArray[np.float32]]]:
    """A task that has been refused with 500, so that its next attempt is a probe."""
    await teacher.check(tokenizer_of(model), CONTEXT)
    server.status = 500
    scoring = asyncio.create_task(teacher.score([5], [sampled(6)], lambda: None))
    await until(lambda: len(server.scored) > 1)
    return scoring


async def test_refused_probe_is_followed_by_the_completion(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> None:
    scoring = await scoring_during_an_outage(server, teacher, model)
    server.status = 413
    with pytest.raises(ServerRefused, match="HTTP 413"):
        await asyncio.wait_for(scoring, 120)
    assert [body["prompt"] for body in server.scored[-2:]] == [[5, 5], [5, 6]]


async def test_refused_probe_of_a_teacher_with_too_short_a_context_says_so(
    server: TeacherStandIn, teacher: Teacher, model: Path
) -> None:
    scoring = await scoring_during_an_outage(server, teacher, model)
    server.status, server.context = 400, CONTEXT
    await until(lambda: f"has a max_model_len of {CONTEXT}" in teacher.problem)
    assert not scoring.done()
    server.status, server.context = 200, CONTEXT + 1
    await asyncio.wait_for(scoring, 120)


async def test_overload_is_not_counted_against_the_completion(
    server: TeacherStandIn, teacher: Teacher
) -> None:
    server.poison, server.poison_status = 9, 503
    scoring = asyncio.create_task(teacher.score([5], [sampled(9)], lambda: None))
    await until(lambda: len(server.scored) > 4 * teacher_module._MAX_FAILURES)
    assert not scoring.done()
    server.poison = -1
    await asyncio.wait_for(scoring, 120)


async def test_teacher_that_accepts_requests_and_answers_none_is_a_problem(
    server: TeacherStandIn,
    session: aiohttp.ClientSession,
    metrics: ActorMetrics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timings = Timings(score_seconds=0.2, max_backoff_seconds=0.02)
    teacher = Teacher(session, TeacherSpec(url=server.url), "", metrics, timings)
    limits: list[float] = []
    call = teacher._call
    monkeypatch.setattr(teacher, "_call", lambda *given: (limits.append(given[2]), call(*given))[1])
    server.answering = asyncio.Event()
    scoring = asyncio.create_task(teacher.score([5], [sampled(*[6] * 9)], lambda: None))
    await until(lambda: "no answer in" in teacher.problem)
    await until(lambda: len(limits) >= 4)
    assert not scoring.done()
    # 10 tokens at 100 a second, and twice as long after each attempt.
    assert limits[:4] == pytest.approx([0.3, 0.6, 1.2, 2.4])
    assert metrics.registry.get_sample_value("scalerl_actor_teacher_failures_total") in (
        len(limits) - 1,
        len(limits),
    )
    server.answering.set()
    (found,) = await asyncio.wait_for(scoring, 120)
    assert len(found) == 9
    assert teacher.problem == ""


def test_limit_of_an_answer_scales_with_tokens_and_ends_at_an_hour(teacher: Teacher) -> None:
    assert teacher.limit_seconds(16_000, 0) == 280.0
    assert teacher.limit_seconds(16_000, 1) == 560.0
    assert teacher.limit_seconds(16_000, 2_000) == 3600.0


async def test_problem_lasts_until_the_last_failing_request_ends(
    server: TeacherStandIn, teacher: Teacher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scalerl.actor.teacher")
    server.poison = 9
    waiting = [asyncio.create_task(teacher.score([5], [sampled(9)], lambda: None)) for _ in range(2)]
    await until(lambda: len(server.scored) > 3)
    await teacher.score([5], [sampled(6)], lambda: None)
    assert "HTTP 500" in teacher.problem
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert "HTTP 500" in teacher.problem
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    waiting[1].cancel()
    await asyncio.wait(waiting)
    assert teacher.problem == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


# --- the actor --------------------------------------------------------------------------------


@dataclass
class Scene:
    coordinator: CoordinatorStandIn
    generator: Generator
    trainer: TrainerSide
    teacher: TeacherStandIn
    session: aiohttp.ClientSession
    train: list[str]
    held_out: list[str]

    async def metrics(self) -> str:
        async with self.session.get(self.generator.control_url + endpoints.METRICS) as response:
            return await response.text()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """The actor is not started; its teacher is up."""
    coordinator, standing = CoordinatorStandIn(), TeacherStandIn(tmp_path / "model")
    write_run(
        tmp_path,
        [f"say {i}" for i in range(12)],
        recipe__distillation={"teacher": {"url": standing.url}},
    )
    task = open_task(load_run(tmp_path / "run.yaml").spec.task)
    train, held_out = ([s[i].id for i in range(len(s))] for s in (task.train, task.held_out))
    await coordinator.start()
    await standing.start()
    generator = Generator(tmp_path, coordinator.url)
    await generator.start_server()
    try:
        async with aiohttp.ClientSession() as session:
            trainer = TrainerSide(session, generator.control_url)
            yield Scene(coordinator, generator, trainer, standing, session, train, held_out)
    finally:
        await generator.end()
        await standing.kill()
        await coordinator.kill()


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


@pytest.mark.usefixtures("unhurried_leases")
async def test_groups_wait_for_the_teacher_and_are_never_pushed_without_it(scene: Scene) -> None:
    coordinator = scene.coordinator
    await scene.generator.start_actor()
    await until(lambda: coordinator.members)
    await scene.trainer.publish(0)
    coordinator.offer(2, scene.train)
    coordinator.offer(1, scene.held_out, Split.HELD_OUT)
    await until(lambda: len(coordinator.groups) == 3)
    for group in coordinator.groups.values():
        prompt = len(group.prompt_token_ids) // 4
        for completion in group.completions:
            expected = [-(prompt + i) / 8 for i in range(completion.tokens)]
            assert floats(completion.teacher_logprobs) == ([] if group.split is Split.HELD_OUT else expected)

    await scene.teacher.kill()
    # Its lease is shorter than the wait.
    coordinator.offer(1, scene.train, remaining_seconds=3.0, lease_id="waits")
    coordinator.offer(1, scene.held_out, Split.HELD_OUT, lease_id="evaluation")
    await until(lambda: "evaluation" in coordinator.groups)
    await until(lambda: coordinator.beats[-1].teacher_problem)
    assert scene.teacher.url in coordinator.beats[-1].teacher_problem
    first = coordinator.beats[-1].progress.get("waits", 0)
    # Longer than its lease: the wait reports progress each second.
    await until(lambda: coordinator.beats[-1].progress.get("waits", 0) >= first + 4)
    # "waits" is graded meanwhile.
    assert "scalerl_actor_grading_seconds_count 5.0" in await scene.metrics()
    assert "waits" in coordinator.beats[-1].held_leases  # type: ignore[operator]
    assert coordinator.beats[-1].generated_leases == ["waits"]
    assert "waits" not in coordinator.groups
    assert not coordinator.releases

    await scene.teacher.start()
    await until(lambda: "waits" in coordinator.groups)
    assert all(completion.teacher_logprobs for completion in coordinator.groups["waits"].completions)
    await until(lambda: not coordinator.beats[-1].teacher_problem)
    assert "scalerl_actor_teacher_failures_total 0.0" not in await scene.metrics()


async def test_evaluation_runs_while_groups_wait_for_the_teacher(
    scene: Scene,
) -> None:
    coordinator = scene.coordinator
    await scene.generator.start_actor()
    await until(lambda: coordinator.members)
    await scene.trainer.publish(0)
    await scene.teacher.kill()
    coordinator.offer(80, scene.train)
    coordinator.offer(1, scene.held_out, Split.HELD_OUT, lease_id="evaluation")
    await until(lambda: "evaluation" in coordinator.groups)
    assert len(coordinator.leased) == 80
    assert not coordinator.releases


async def test_actor_of_another_tokenizer_ends_before_its_first_lease(scene: Scene, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "teacher")
    scene.teacher.model = tmp_path / "teacher"
    file = scene.teacher.model / "tokenizer.json"
    content = json.loads(file.read_text())
    another("exchanged", content["model"]["vocab"], content["added_tokens"])
    file.write_text(json.dumps(content))
    scene.coordinator.offer(1, scene.train)
    await scene.generator.start_actor()
    assert await scene.generator.exit_code() == 2
    assert not scene.coordinator.requests


@pytest.mark.parametrize("signal", ["terminated", "the run is over"])
async def test_actor_ends_while_groups_wait_for_the_teacher(scene: Scene, signal: str) -> None:
    coordinator = scene.coordinator
    await scene.generator.start_actor()
    await until(lambda: coordinator.members)
    await scene.trainer.publish(0)
    await scene.teacher.kill()
    coordinator.offer(2, scene.train)
    await until(lambda: coordinator.beats and coordinator.beats[-1].teacher_problem)
    if signal == "terminated":
        scene.generator.terminate()
    else:
        coordinator.stop = True
    assert await scene.generator.exit_code() == 0
    assert not coordinator.groups
    assert sum(len(release.lease_ids) for release in coordinator.releases) == 2


@pytest.mark.parametrize("end", ["killed", "drained"])
async def test_completions_waiting_for_the_teacher_are_scored_whole(tmp_path: Path, end: str) -> None:
    """The next actor gets the sampled tokens, and asks the teacher for all of them."""
    # Drained before the first regular report, of every fifth heartbeat.
    coordinator = CoordinatorStandIn(heartbeat_seconds=0.2 if end == "killed" else 2.0)
    standing = TeacherStandIn(tmp_path / "model", context=4096)
    teacher = {"teacher": {"url": standing.url}}
    prompts = [letter + "{" for letter in "fghijklm"]  # 270 tokens and more
    write_run(tmp_path, prompts, model__contextTokens=2048, recipe__distillation=teacher)
    train = open_task(load_run(tmp_path / "run.yaml").spec.task).train
    await coordinator.start()
    await standing.start()
    first = Generator(tmp_path, coordinator.url, name="generator-0")
    second = Generator(tmp_path, coordinator.url, name="generator-1")
    async with aiohttp.ClientSession() as session:
        try:
            await first.start_server()
            await first.start_actor()
            await until(lambda: coordinator.members)
            await TrainerSide(session, first.control_url).publish(0)
            await standing.kill()
            coordinator.offer(1, [train[0].id], max_tokens=1536, policy_version=1)
            await until(lambda: coordinator.beats and coordinator.beats[-1].teacher_problem)
            if end == "killed":
                await until(lambda: coordinator.partials.nbytes)
                await first.kill_actor()
            else:
                first.terminate()
                assert await first.exit_code() == 0
            assert not coordinator.groups
            saved = coordinator.partials.nbytes // 8
            coordinator.reassign()
            await standing.start()
            await second.start_server()
            await second.start_actor()
            await until(lambda: any(m.name == "generator-1" for m in coordinator.members.values()))
            await TrainerSide(session, second.control_url).publish(1)
            await until(lambda: coordinator.groups)
            async with session.get(second.control_url + endpoints.METRICS) as response:
                handed_over = f"scalerl_actor_handed_over_tokens_total {saved}.0"
                assert handed_over in await response.text()
        finally:
            await first.end()
            await second.end()
            await standing.kill()
            await coordinator.kill()
    (group,) = coordinator.groups.values()
    prompt = len(group.prompt_token_ids) // 4
    for completion in group.completions:
        expected = [-(prompt + i) / 8 for i in range(completion.tokens)]
        assert floats(completion.teacher_logprobs) == expected
    tokens = sum(completion.tokens for completion in group.completions)
    assert (saved == tokens) if end == "drained" else (0 < saved <= tokens), (saved, tokens)
