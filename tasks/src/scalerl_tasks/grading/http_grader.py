"""``verifier.http``: scores of a reward service.

Completions of all groups share its requests: up to ``batch`` of them each, at most ``concurrency`` at a time.

====================================================  ============================================================
state of the service                                  effect
====================================================  ============================================================
no connection, no answer in time, a status other      its completions wait, and are sent again with back-off, as long
than 200, an answer that is not as documented         as it takes; :attr:`HttpGrader.problem` says why
one completion fails alone so ``retries`` times,      it has no verdict
while one that had a score is scored again
a status of 400, 413 or 422 for one completion        the same, at once
a score that is no number or out of its range         the same
====================================================  ============================================================
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import msgspec

from scalerl_api.http_answers import IDENTITY
from scalerl_api.http_client import Unanswered, exchange, open_session
from scalerl_processes.waiting import calling, cancel
from scalerl_tasks.environments.timings import TIMINGS, Timings
from scalerl_tasks.errors import GradingError
from scalerl_tasks.grading.grading_pool import Graded, PoolCounts, Tick
from scalerl_tasks.prompts import Prompt, render_prompt
from scalerl_tasks.thoughts import THOUGHT
from scalerl_tasks.verdict import NOT_APPLICABLE, REWARD, SCORE_RANGE, as_verdict

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("scalerl_tasks.grading.http")

TOKEN = "REWARD_TOKEN"
"""Environment variable with the token of the service."""
_OF_THE_COMPLETION = (400, 413, 422)
_MAX_ANSWER_BYTES = 1 << 20
_ANSWER_BYTES_PER_SCORE = 256


@dataclass(frozen=True, slots=True)
class RewardService:
    """A service and how it is called."""

    url: str
    batch: int = 64
    concurrency: int = 8
    timeout_seconds: float = 10.0
    range: tuple[float, float] = SCORE_RANGE
    """Lowest and highest score of the service."""
    template: str | None = None
    system: str | None = None
    retries: int = 5
    """Failures of a completion, while others succeed, after which it has no verdict: the cause is then the completion."""


class _Scores(msgspec.Struct):
    """An answer of the service."""

    scores: list[float | None]


@dataclass(slots=True, eq=False)
class _Item:
    row: dict[str, Any]
    done: asyncio.Future[Graded]
    failures: int = 0
    """Failed requests with this completion alone, while the service answered others."""
    alone: bool = False
    """Sent in a request of its own: a request with it failed."""
    waits_since: float | None = None
    """When a request with it failed first, because the service is down."""


class _Refused(Exception):
    """The service refused a request because of what is in it."""


class _Down(Exception):
    """The service gave no scores; the message says what it gave."""


class HttpGrader:
    """Grades by a service; the interface of :class:`~.grading_pool.GradingPool`. Use it from one event loop."""

    def __init__(self, service: RewardService, timings: Timings = TIMINGS) -> None:
        self._service, self._timings = service, timings
        self.part_names: tuple[str, ...] = () if service.range == SCORE_RANGE else (REWARD,)
        self.counts = PoolCounts()
        self.problem = ""
        self._waiting: deque[_Item] = deque()
        self._changed = asyncio.Event()
        self._senders: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._delay = timings.first_back_off
        self._scored_row: dict[str, Any] | None = None
        """A completion that had a score, to ask whether the service works: a judge may answer an empty request while its model is
        down."""

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = {**IDENTITY, "content-type": "application/json"}
        if token := os.environ.get(TOKEN, ""):
            headers["authorization"] = f"Bearer {token}"
        self._session = open_session(headers, aiohttp.TCPConnector(limit=self._service.concurrency))
        self._senders = [
            asyncio.create_task(self._send(), name=f"reward-service-{at}")
            for at in range(self._service.concurrency)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel(*self._senders)
        if self._session is not None:
            await self._session.close()
        for item in self._waiting:
            if not item.done.done():
                item.done.set_exception(GradingError("the grading pool was closed"))
                item.done.exception()

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        """Grade completions of one prompt. Waits while the service is down, and calls ``on_graded`` every second meanwhile, so that
        the lease is kept.
        """
        loop = asyncio.get_running_loop()
        shared = self._prompt(prompt)
        items = [
            _Item(
                {**shared, "completion": THOUGHT + text if in_thought else text, "index": at},
                loop.create_future(),
            )
            for at, text in enumerate(completions)
        ]
        self._waiting.extend(items)
        self._changed.set()
        async with calling(on_graded or (lambda: None), self._timings.waiting):
            return list(await asyncio.gather(*(item.done for item in items)))

    async def check(self, prompts: Sequence[Prompt], on_checked: Callable[[str | None], None]) -> None:
        """Nothing: a run that waits for its service is not checked by it."""
        for _ in prompts:
            on_checked(None)

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        rendered = render_prompt(prompt, self._service.template, self._service.system)
        return {
            "id": prompt.id,
            "messages": rendered.messages,
            "answer": prompt.answer,
            "metadata": {**prompt.labels, **prompt.metadata},
        }

    # --- requests -------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            items = self._next()
            if not items:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                graded = await self._scored([item.row for item in items])
            except _Refused as error:
                self._failed(items, str(error), is_cause=True, final=True)
            except _Down as error:
                is_cause = len(items) == 1 and await self._answers()
                self._failed(items, str(error), is_cause=is_cause, final=False)
                if not is_cause:
                    if not self.problem:
                        log.warning("%s; completions wait", error)
                    self.problem = str(error)
                    await asyncio.sleep(self._delay)
                    self._delay = min(self._timings.max_back_off, 2 * self._delay)
            else:
                self._up()
                self._scored_row = items[0].row
                for item, one in zip(items, graded, strict=True):
                    self._record(item, one)

    async def _answers(self) -> bool:
        """Whether the service scores a completion that it has scored before."""
        if self._scored_row is None:
            return False
        try:
            await self._scored([self._scored_row])
        except (_Refused, _Down):
            return False
        self._up()
        return True

    def _up(self) -> None:
        if self.problem:
            log.info("the reward service %s answers again", self._service.url)
        self.problem, self._delay = "", self._timings.first_back_off

    def _next(self) -> list[_Item]:
        """The completions of the next request; one that failed goes alone."""
        chosen: list[_Item] = []
        waiting = self._waiting
        while waiting and len(chosen) < self._service.batch:
            if waiting[0].done.done():  # cancelled
                waiting.popleft()
                continue
            if waiting[0].alone and chosen:
                break
            chosen.append(waiting.popleft())
            if chosen[-1].alone:
                break
        return chosen

    def _failed(self, items: list[_Item], error: str, *, is_cause: bool, final: bool) -> None:
        """Queue the completions of a failed request again, each alone. One that is the cause has no verdict after its last retry."""
        for item in items:
            item.alone = True
            item.failures += is_cause
            if not is_cause:
                item.waits_since = item.waits_since or time.monotonic()
            if len(items) == 1 and is_cause and (final or item.failures >= self._service.retries):
                self._record(item, Graded(None, f"{error} (prompt {item.row['id']})"))
            else:
                self._waiting.append(item)
        self._changed.set()

    def _record(self, item: _Item, graded: Graded) -> None:
        self.counts.graded += 1
        self.counts.errors += graded.error is not None
        now = time.monotonic()
        if not item.done.done():
            item.done.set_result(replace(graded, waited=now - (item.waits_since or now)))

    async def _scored(self, rows: list[dict[str, Any]]) -> list[Graded]:
        """The verdicts of a request's completions.

        Raises:
            _Refused, _Down
        """
        import aiohttp

        assert self._session is not None
        url, seconds = self._service.url, self._service.timeout_seconds
        where = f"the reward service {url}"
        body = msgspec.json.encode({"completions": rows}, enc_hook=str)
        timeout = aiohttp.ClientTimeout(total=seconds)
        limit = _MAX_ANSWER_BYTES + _ANSWER_BYTES_PER_SCORE * len(rows)
        try:
            status, content = await exchange(self._session, "POST", url, timeout, limit, data=body)
        except Unanswered as error:
            text = f"{where} does not answer: {error}"
            if error.is_slow:
                text = (
                    f"{where} did not answer {len(rows)} completions within {seconds:g} s; raise "
                    "verifier.timeoutSeconds, or lower verifier.http.batch"
                )
            raise _Down(text) from None
        if status in _OF_THE_COMPLETION:
            raise _Refused(f"{where} refused a request with status {status}")
        if status != 200:
            advice = f"; its token is the variable {TOKEN}" if status in (401, 403) else ""
            raise _Down(f"{where} answered with status {status}{advice}")
        return self._read(content, len(rows), where)

    def _read(self, content: bytes, count: int, where: str) -> list[Graded]:
        try:
            scores = msgspec.json.decode(content, type=_Scores).scores
        except (msgspec.MsgspecError, UnicodeDecodeError):
            kind = "HTML" if content.lstrip().startswith(b"<") else "something else"
            raise _Down(f'{where} answered {kind}, not {{"scores": [numbers or null]}}') from None
        if len(scores) != count:
            raise _Down(
                f"{where} answered {len(scores)} scores for {count} completions; it has to give one each"
            )
        return [self._verdict(score, where) for score in scores]

    def _verdict(self, score: float | None, where: str) -> Graded:
        if score is None:
            return Graded(None, NOT_APPLICABLE)
        try:
            return Graded(as_verdict(score, self.part_names, self._service.range))
        except ValueError as error:
            return Graded(None, f"{error}".replace("the verifier", where, 1) + " (verifier.range)")
