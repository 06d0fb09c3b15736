"""The pool that grades: scores in, and nothing that a completion says can stop it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from scalerl_tasks.answers import THOUGHT
from scalerl_tasks.errors import GradingError
from scalerl_tasks.grading.client import ForkServer, Grader
from scalerl_tasks.grading.protocol import Limits, Request, Setup
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verifiers import VerifierConfig

MAX_COMPLETION_CHARACTERS = 16 << 20
"""A longer completion is not graded: score 0 with an error."""

MIN_MEMORY_BYTES = 64 << 20
"""A grader with less could not even hold what it is sent."""

_MAX_REQUEST_CHARACTERS = 4 << 20  # of one message to a grader, unless a single completion is longer
_DEATHS_TO_BLAME = 2  # a grader can die of other causes: a completion is blamed when its grader dies twice
_MAX_FORK_ATTEMPTS = 6  # for one grader
_FIRST_BACK_OFF_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Graded:
    """A completion's score in [0, 1]; ``error`` says why it is 0 when grading failed."""

    score: float
    error: str | None = None


@dataclass(slots=True)
class PoolCounts:
    """What the pool has seen since its start, for metrics."""

    graded: int = 0
    errors: int = 0
    """Of ``graded``: those with an error."""
    timeouts: int = 0
    deaths: int = 0
    """Graders that ended without being told to."""
    forks: int = 0


@dataclass(slots=True)
class _Job:
    prompt: Prompt
    completions: Sequence[str]
    done: asyncio.Future[list[Graded]]
    on_graded: Callable[[], None] | None
    results: list[Graded] = field(default_factory=list)
    deaths: int = 0
    """Of graders, in a row, on the first completion without a result."""


class GradingPool:
    """Grades completions in child processes with limits on time and memory.

    Use it from one event loop, as ``async with GradingPool(...) as pool``; threads in the same process do not
    matter.

    Args:
        verifier: what to grade with.
        workers: graders at a time. One group is graded by one grader.
        timeout_seconds: wall-clock time for one completion; a grader that takes longer is killed and
            replaced.
        memory_bytes: what grading may allocate beyond what a grader holds at birth (address space,
            RLIMIT_AS).
        start_timeout_seconds: for the grading process to start and open the verifier.
    """

    def __init__(
        self,
        verifier: VerifierConfig,
        *,
        workers: int = 1,
        timeout_seconds: float = 10.0,
        memory_bytes: int = 1 << 30,
        start_timeout_seconds: float = 60.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}, must be at least 1")
        if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise ValueError(f"timeout_seconds is {timeout_seconds}, must be positive")
        if memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(f"memory_bytes is {memory_bytes}, must be at least {MIN_MEMORY_BYTES} (64 MiB)")
        self.counts = PoolCounts()
        self._setup = Setup(verifier, Limits(timeout_seconds, memory_bytes))
        self._workers = workers
        self._start_timeout_seconds = start_timeout_seconds
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._server: ForkServer | None = None
        self._server_lock = asyncio.Lock()
        self._slots: list[asyncio.Task[None]] = []
        self._closed = False
        self._broken: GradingError | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the grading process.

        Raises:
            VerifierError: the verifier cannot be opened, or evaluates text as code.
            GradingError: the process does not start.
        """
        if self._slots or self._closed:
            raise GradingError("a grading pool is started once; make a new one")
        self._server = await ForkServer.start(self._setup, self._start_timeout_seconds)
        self._slots = [
            asyncio.create_task(self._run_slot(), name=f"grading-slot-{slot}")
            for slot in range(self._workers)
        ]

    async def aclose(self) -> None:
        """End all processes; groups still waiting for their grades get a GradingError."""
        self._closed = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        self._refuse_waiting(GradingError("the grading pool was closed"))

    async def score_group(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None] | None = None,
    ) -> list[Graded]:
        """Grade completions of one prompt; the result has their order.

        ``in_thought``: the prompt left a thought open, so the completions begin inside one. ``on_graded`` is called
        as each of them has its verdict, and must not raise.

        A completion whose grading fails in any way has score 0 and an error. Cancelling the call is safe.

        Raises:
            GradingError: the pool is closed, or its processes cannot be kept running. Nothing was graded.
            TypeError, AttributeError, pickle.PicklingError: the prompt's metadata cannot be pickled.
        """
        if self._broken is not None:
            raise self._broken
        if not self._slots or self._closed:
            raise GradingError("the grading pool is not running; use it inside `async with`")
        if not completions:
            return []
        texts = [THOUGHT + text for text in completions] if in_thought else list(completions)
        job = _Job(prompt, texts, asyncio.get_running_loop().create_future(), on_graded)
        self._jobs.put_nowait(job)
        return await job.done

    # --- one slot: the owner of one grader at a time --------------------------------------------

    async def _run_slot(self) -> None:
        grader: Grader | None = None
        try:
            while True:
                job = await self._jobs.get()
                mine, grader = grader, None
                try:
                    grader = await self._grade(job, mine)
                except asyncio.CancelledError:
                    _fail(job, GradingError("the grading pool was closed"))
                    raise
                except GradingError as error:
                    _fail(job, error)
                    self._broken = error
                    self._refuse_waiting(error)
                except Exception as error:  # a prompt that cannot be pickled is its caller's affair
                    _fail(job, error)
                else:
                    if not job.done.done():
                        job.done.set_result(job.results)
        finally:
            if grader is not None:
                grader.close()

    async def _grade(self, job: _Job, grader: Grader | None) -> Grader | None:
        """Fill ``job.results``; returns the grader that is fit for the next job, if any."""
        try:
            while len(job.results) < len(job.completions) and not job.done.done():
                request = _next_request(job)
                if not request.completions:
                    self._record(job, _too_long(job.completions[len(job.results)]))
                    continue
                if grader is None:
                    grader = await self._fork()
                if not await self._grade_request(job, request, grader):
                    self._drop(grader)
                    grader = None
        except BaseException:
            if grader is not None:
                self._drop(grader)
            raise
        return grader

    async def _grade_request(self, job: _Job, request: Request, grader: Grader) -> bool:
        """Grade what can be graded of one message; False when the grader is of no further use.

        Every call grades a completion or counts a death against one, so that repeating it ends.
        """
        grader.send(request)
        before = len(job.results)
        in_time = await self._collect(grader, job, len(request.completions))
        if len(job.results) > before:
            job.deaths = 0
        if not in_time:
            self.counts.timeouts += 1
            seconds = self._setup.limits.timeout_seconds
            self._record(job, Graded(0.0, f"grading took longer than {seconds:g} s and was killed"))
            return False
        if len(job.results) < before + len(request.completions) and not grader.retired:
            self.counts.deaths += 1
            job.deaths += 1
            if job.deaths >= _DEATHS_TO_BLAME:
                self._record(job, Graded(0.0, f"the grader died {job.deaths} times on this completion"))
                job.deaths = 0
        return not grader.ended

    async def _collect(self, grader: Grader, job: _Job, count: int) -> bool:
        """Take records until there are ``count`` or the grader ends; False when one is overdue."""
        taken = 0
        while True:
            for score, error in grader.results[taken:]:
                self._record(job, Graded(score, error))
                taken += 1
            if taken >= count or grader.ended:
                return True
            if not await grader.changed(self._setup.limits.timeout_seconds):
                return False

    def _record(self, job: _Job, graded: Graded) -> None:
        job.results.append(graded)
        self.counts.graded += 1
        self.counts.errors += graded.error is not None
        if job.on_graded is not None:
            job.on_graded()

    def _drop(self, grader: Grader) -> None:
        if self._server is not None:
            self._server.kill(grader)

    # --- the fork server ------------------------------------------------------------------------

    async def _fork(self) -> Grader:
        """A fresh grader; replaces a fork server that died, with a back-off and a limit."""
        for attempt in range(_MAX_FORK_ATTEMPTS):
            try:
                async with self._server_lock:
                    server = await self._living_server()
                grader = await server.fork()
            except GradingError as error:
                last = error
                await asyncio.sleep(_FIRST_BACK_OFF_SECONDS * 2**attempt)
            else:
                self.counts.forks += 1
                return grader
        raise GradingError(f"no grader after {_MAX_FORK_ATTEMPTS} attempts: {last}") from last

    async def _living_server(self) -> ForkServer:
        if self._server is None or self._server.dead:
            if self._server is not None:
                await self._server.close()
                self._server = None
            self._server = await ForkServer.start(self._setup, self._start_timeout_seconds)
        return self._server

    def _refuse_waiting(self, error: GradingError) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                _fail(self._jobs.get_nowait(), error)


def _fail(job: _Job, error: Exception) -> None:
    if not job.done.done():
        job.done.set_exception(error)


def _next_request(job: _Job) -> Request:
    """The next completions as one message; empty when the next one is too long to be graded at all."""
    chosen: list[str] = []
    characters = 0
    for completion in job.completions[len(job.results) :]:
        characters += len(completion)
        if len(completion) > MAX_COMPLETION_CHARACTERS or (chosen and characters > _MAX_REQUEST_CHARACTERS):
            break
        chosen.append(completion)
    return Request(job.prompt, chosen)


def _too_long(completion: str) -> Graded:
    return Graded(
        0.0,
        f"a completion of {len(completion):,} characters is over the limit of {MAX_COMPLETION_CHARACTERS:,}",
    )
