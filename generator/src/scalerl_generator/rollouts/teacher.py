"""The teacher of ``recipe.distillation``: an external vLLM server that scores the student's tokens.

Each completion takes one request to ``/v1/completions``, with prompt and completion as the prompt and with
``prompt_logprobs``. vLLM computes these at temperature 1 and samples one further token, which is discarded.

=====================================  ==========================================================================
state of the teacher                   effect on the actor
=====================================  ==========================================================================
has another tokenizer, or too short a  :class:`UnfitTeacher` before the first lease: exit code 2
context, or refuses the first call
does not answer, is overloaded,        groups wait and retry with back-off, and their leases stay alive; reported by
refuses every call, accepts requests   a warning, ``scalerl_actor_teacher_failures`` and the heartbeat's
without answering any, or was          ``teacher_problem``
restarted with too short a context
refuses one completion (400, 413,      that group fails, and its lease is released
422), returns no log-probability for
it, or fails on it repeatedly while
other requests or a probe succeed
=====================================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from scalerl_api.http_answers import IDENTITY, BadAnswer, decode_json
from scalerl_api.http_client import Backoff, Unanswered, exchange
from scalerl_api.recipe import TeacherSpec
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.vllm_client import gather_all
from scalerl_generator.vllm_replies import (
    BadReply,
    ServerDown,
    ServerRefused,
    VllmError,
    read_completion_prompt_logprobs,
    read_error,
)
from scalerl_processes.waiting import calling
from scalerl_tasks.tokenizer import ModelTokenizer

logger = logging.getLogger("scalerl.actor.teacher")

API_KEY = "TEACHER_API_KEY"
"""Environment variable with the teacher's API key."""

_MAX_ANSWER_BYTES = 2**26
"""A scored token has some 100 bytes."""
_CHECK_SECONDS = 60.0
_SCORED_TOKENS_PER_SECOND = 100.0
"""The timeout of the first attempt is ``Timings.score_seconds`` plus the tokens divided by this rate: 280 s for 16,000 tokens.
The rate is far below any teacher's prefill rate, since the requests of all actors may be queued before this one."""
_MAX_SCORE_SECONDS = 3600.0
"""Upper limit of the timeout, which doubles after each attempt without an answer: a cancelled request loses its place in
the queue of a teacher that is only busy."""
_REQUESTS = 16
"""Maximum number of concurrent requests of this actor; vLLM queues the requests of all actors."""
_MAX_FAILURES = 5
"""Failures of a request, each after the teacher has answered another request or a probe, that identify the completion as
the cause."""
_DETOKENIZED_IDS = 2048
_OF_THE_COMPLETION = (400, 413, 422)
"""Status codes that concern a single request; all others concern the teacher."""
_OVERLOADED = (408, 429, 503)

_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  x = [1, -2.5e-3]\n\n\tif x[0] >= 10_000: return {'a': \"b\"}\r\n",
    "\\frac{12345}{678} + \\sqrt{90} = 42; I'm, you're, DON'T",
    "Zürich, naïve, Ελληνικά, Привет, 你好世界, こんにちは, مرحبا, 🙂👩‍💻",
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
)

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Timings:
    """Times of the client, in seconds."""

    score_seconds: float = 120.0
    """Timeout of a request without tokens."""
    max_backoff_seconds: float = 30.0
    progress_seconds: float = 1.0
    """Between two calls of ``on_waiting``."""


class UnfitTeacher(Exception):
    """The teacher cannot score this student's tokens; a retry does not help."""


class _NoAnswer(ServerDown):
    """The teacher accepted a request and did not answer it in time."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int


class _Detokenized(msgspec.Struct):
    prompt: str


class Teacher:
    """Client of the teacher.

    Args:
        session: HTTP session of this actor; the caller closes it.
        key: API key of the teacher; empty if it needs none.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        spec: TeacherSpec,
        key: str,
        metrics: ActorMetrics,
        timings: Timings = Timings(),
    ) -> None:
        self._session, self._metrics, self._timings = session, metrics, timings
        self._url, self._model = spec.url.rstrip("/"), spec.model
        self._headers = {**IDENTITY, "Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._free = asyncio.Semaphore(_REQUESTS)
        self._where = f"recipe.distillation.teacher ({self._url})"
        self._context_tokens = 0
        self._answers = 0
        """Completions and probes that the teacher has scored."""
        self._answer_seconds = 0.0
        """Duration of the last answered request."""
        self._failing: dict[object, str] = {}
        """Requests whose last attempt failed, oldest first, with the error."""

    @property
    def problem(self) -> str:
        """Why groups wait for the teacher; empty while no request fails."""
        return next(iter(self._failing.values()), "")

    async def check(self, tokenizer: ModelTokenizer, context_tokens: int) -> None:
        """Wait until the teacher answers, and check that it fits the student.

        Args:
            context_tokens: ``model.contextTokens``.

        Raises:
            UnfitTeacher: see the module's table.
        """
        self._context_tokens = context_tokens
        backoff = Backoff(0.5, self._timings.max_backoff_seconds)
        with self._request() as request:
            while True:
                try:
                    await self._check_model()
                    await self._check_context()
                    await self._check_tokenizer(tokenizer)
                except ServerRefused as error:
                    if error.status < 500 and error.status not in (408, 429):
                        raise UnfitTeacher(
                            f"{self._where} refuses: {error}. It has to be a vLLM server, url without /v1, and where it "
                            f"asks for an API key, that is the variable {API_KEY} of the generator"
                        ) from error
                    self._failed(request, error)
                except BadReply as error:
                    raise UnfitTeacher(f"{self._where}: is it a vLLM server? {error}") from error
                except ServerDown as error:
                    self._failed(request, error)
                else:
                    break
                await backoff.wait()
        logger.info("the teacher is %s at %s", self._model, self._url)

    async def score(
        self, prompt: Sequence[int], completions: Sequence[PartialCompletion], on_waiting: Callable[[], None]
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities of each completion's tokens, float32 ``[tokens]``, 0 at masked tokens.

        Waits while the teacher is unavailable.

        Args:
            on_waiting: called every second until all completions are scored.

        Raises:
            ServerDown, ServerRefused, BadReply, GenerationFailed: the teacher is available but cannot score these completions.
        """
        async with calling(on_waiting, self._timings.progress_seconds):
            return await gather_all(self._score(prompt, completion) for completion in completions)

    async def _score(self, prompt: Sequence[int], completion: PartialCompletion) -> NDArray[np.float32]:
        token_ids = [*prompt, *completion.token_ids.tolist()]
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        content = await self._scored(body)
        used = np.concatenate([np.zeros(len(prompt) - 1, np.bool_), ~completion.masked])
        logprobs = read_completion_prompt_logprobs(content, token_ids, used)[len(prompt) - 1 :]
        self._metrics.teacher_tokens.inc(len(logprobs))
        return logprobs

    async def _scored(self, body: dict[str, Any]) -> bytes:
        """The response body for one completion.

        If the teacher has answered nothing since a failure, a probe with as many tokens precedes the next attempt. Its
        result distinguishes a failing teacher, for which the request waits, from a failing completion, which is dropped.
        """
        probe = body | {"prompt": body["prompt"][:1] * len(body["prompt"])}
        backoff, failures, timeouts, answers = Backoff(0.5, self._timings.max_backoff_seconds), 0, 0, -1
        with self._request() as request:
            while True:
                async with self._free:  # released during the back-off, so that other requests proceed
                    probes = self._answers == answers
                    try:
                        if probes:
                            await self._answer(probe, timeouts)
                            probes = False
                        return await self._answer(body, timeouts)
                    except (ServerDown, ServerRefused) as error:
                        timeouts += isinstance(error, _NoAnswer)
                        status = error.status if isinstance(error, ServerRefused) else None
                        unfit = await self._unfit() if status in _OF_THE_COMPLETION else None
                        if status in _OF_THE_COMPLETION and unfit is None and not probes:
                            raise
                        self._failed(request, unfit or error)
                        # A teacher with too short a context still scores short completions, an overloaded one some of them.
                        if unfit is None and status not in _OVERLOADED:
                            failures += not probes and -1 < answers < self._answers
                        if failures == _MAX_FAILURES:
                            raise
                        # A refused probe does not show the teacher's state: the next attempt is the completion itself.
                        refused = probes and status in _OF_THE_COMPLETION and unfit is None
                answers = -1 if refused else self._answers
                await backoff.wait()

    def limit_seconds(self, tokens: int, timeouts: int) -> float:
        """Timeout of a request with ``tokens`` tokens, after ``timeouts`` attempts that timed out."""
        first = self._timings.score_seconds + tokens / _SCORED_TOKENS_PER_SECOND + 2 * self._answer_seconds
        return min(first * 2.0 ** min(timeouts, 10), _MAX_SCORE_SECONDS)

    async def _answer(self, body: dict[str, Any], timeouts: int) -> bytes:
        started = time.monotonic()
        limit = self.limit_seconds(len(body["prompt"]), timeouts)
        content = await self._call("/v1/completions", body, limit)
        self._answers += 1
        self._answer_seconds = time.monotonic() - started
        return content

    # --- checks ----------------------------------------------------------------------------------

    async def _check_model(self) -> None:
        served = [model.id for model in (await self._read("/v1/models", None, _Models)).data]
        if self._model is None and served:
            # Later requests name the model, so a server that has since loaded another model refuses them.
            self._model = served[0]
        if self._model not in served:
            raise UnfitTeacher(
                f"{self._where} serves {served}, not recipe.distillation.teacher.model ({self._model})"
            )

    async def _unfit(self) -> UnfitTeacher | VllmError | None:
        """Why the teacher cannot score any completion, if so: it may have been restarted since :meth:`check`."""
        try:
            await self._check_context()
        except (UnfitTeacher, VllmError) as error:
            return error
        return None

    async def _check_context(self) -> None:
        length, context_tokens = (await self._tokenize(_PROBES[0])).max_model_len, self._context_tokens
        if length <= context_tokens:
            raise UnfitTeacher(
                f"{self._where} has a max_model_len of {length}, which must be more than model.contextTokens "
                f"({context_tokens}), because vLLM samples a token beyond those that it scores: serve it with --max-model-len "
                f"{context_tokens + 1} or more, or lower model.contextTokens"
            )

    async def _check_tokenizer(self, tokenizer: ModelTokenizer) -> None:
        """Check that both encode the same texts to the same tokens, and each token to the same text.

        Spaces are ignored, since transformers drops some.
        """
        texts = [*_PROBES, "".join(tokenizer.added_tokens)]
        for text, here in zip(texts, tokenizer.encode(texts), strict=True):
            there = (await self._tokenize(text)).tokens
            if there != here:
                raise self._another_tokenizer(f"{text!r} is {_short(there)} there and {_short(here)} here")
        size = tokenizer.tokens
        chunks = [
            list(range(first, min(first + _DETOKENIZED_IDS, size)))
            for first in range(0, size, _DETOKENIZED_IDS)
        ]
        for ids, mine in zip(chunks, tokenizer.texts(chunks), strict=True):
            theirs = await self._detokenize(ids)
            if theirs.replace(" ", "") != mine.replace(" ", ""):
                raise self._another_tokenizer(f"tokens {ids[0]} to {ids[-1]} have other texts")
        if beyond := await self._detokenize([size, size + 1]):
            raise self._another_tokenizer(f"the student has {size} tokens, and the teacher more: {beyond!r}")

    def _another_tokenizer(self, difference: str) -> UnfitTeacher:
        return UnfitTeacher(
            f"{self._where} has another tokenizer than model: {difference}. Its log-probabilities would be of other tokens: "
            "serve a model of the student's family, or train another student"
        )

    async def _tokenize(self, text: str) -> _Tokenized:
        return await self._read("/tokenize", {"prompt": text, "add_special_tokens": False}, _Tokenized)

    async def _detokenize(self, ids: list[int]) -> str:
        return (await self._read("/detokenize", {"tokens": ids}, _Detokenized)).prompt

    # --- calls -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _request(self) -> Iterator[object]:
        """Key of a request in ``_failing``, removed at the end of the block."""
        request = object()
        try:
            yield request
        finally:
            if self._failing.pop(request, None) is not None and not self._failing:
                logger.info("no group waits for %s any more", self._where)

    def _failed(self, request: object, error: VllmError | UnfitTeacher) -> None:
        self._metrics.teacher_failures.inc()
        problem = f"{error}" if isinstance(error, UnfitTeacher) else f"{self._where}: {error}"
        if not self._failing:
            logger.warning("groups wait for log-probabilities: %s", problem)
        self._failing[request] = problem

    async def _read(self, path: str, body: dict[str, Any] | None, reply: type[Reply]) -> Reply:
        try:
            return decode_json(await self._call(path, body, _CHECK_SECONDS), reply)
        except BadAnswer as error:
            raise BadReply(str(error)) from error

    async def _call(self, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> bytes:
        """The response body of a GET (without ``body``) or a POST (with it)."""
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=10.0)
        named = body if body is None or self._model is None else body | {"model": self._model}
        method, url = ("GET" if body is None else "POST"), self._url + path
        data = None if body is None else msgspec.json.encode(named)
        try:
            status, content = await exchange(
                self._session, method, url, timeout, _MAX_ANSWER_BYTES, data=data, headers=self._headers
            )
        except Unanswered as error:
            raise (_NoAnswer if error.is_slow else ServerDown)(f"{url}: {error}") from error
        if status != 200:
            # Reported in the run's status: only vLLM's own message, and nothing of another server's answer.
            raise ServerRefused(path, status, read_error(content, "without an error message of vLLM"))
        return content


def _short(ids: list[int]) -> str:
    return f"{ids}" if len(ids) <= 12 else f"{ids[:12]} and {len(ids) - 12} more"
