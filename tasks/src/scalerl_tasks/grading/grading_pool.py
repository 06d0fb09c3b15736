"""The pool that grades completions; no completion can stop it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from scalerl_processes.waiting import cancel
from scalerl_tasks.environments.protocol import Message, read_content
from scalerl_tasks.errors import GradingError
from scalerl_tasks.grading.fork_client import ForkServer, Grader
from scalerl_tasks.grading.protocol import CheckRequest, Limits, Request, Setup
from scalerl_tasks.plugins import Plugin
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.thoughts import THOUGHT
from scalerl_tasks.verdict import Verdict
from scalerl_tasks.verifiers import VerifierConfig

MAX_COMPLETION_CHARACTERS = 16 << 20
"""A longer completion is not graded: no verdict, with an error."""

MIN_MEMORY_BYTES = 64 << 20
"""A grader with less memory could not hold its requests."""

Tick = Callable[[], None] | None
"""Called for each graded completion, and every second while a group waits, so that its lease is kept; it must not raise."""

_MAX_REQUEST_CHARACTERS = 4 << 20  # of one message to a grader, unless a single completion is longer
_MAX_DEATHS = 2  # a grader can die of other causes: a completion fails when its grader has died twice
_MAX_FORK_ATTEMPTS = 6  # for one grader


@dataclass(frozen=True, slots=True)
class Graded:
    """A completion's verdict, or the error if grading failed; or the step of an environment."""

    verdict: Verdict | None
    error: str | None = None
    messages: tuple[Message, ...] = ()
    """What an environment says, if its episode goes on; the verdict holds if it ends here."""
    turn_reward: float = 0.0
    """The part of the episode's score that the reply earned, in [-1, 1], if the episode goes on."""
    waited: float = field(default=0.0, compare=False)
    """Seconds for which it waited because the environment, or a service that scores, was down."""

    @property
    def score(self) -> float:
        """The verdict's score; 0 without a verdict."""
        return 0.0 if self.verdict is None else self.verdict.score


@dataclass(slots=True)
class PoolCounts:
    """Counts since the pool's start, for metrics."""

    graded: int = 0
    errors: int = 0
    """Part of ``graded``: completions with an error in place of a verdict."""
    timeouts: int = 0
    deaths: int = 0
    """Graders that ended unexpectedly."""
    forks: int = 0

    def __add__(self, other: PoolCounts) -> PoolCounts:
        return PoolCounts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(slots=True)
class _Job:
    prompt: Prompt | None
    """None: the prompts of ``items`` are checked."""
    items: Sequence[str] | Sequence[Prompt]
    """Completions of ``prompt``, or prompts."""
    done: asyncio.Future[list[Graded]]
    on_graded: Tick
    results: list[Graded] = field(default_factory=list)
    deaths: int = 0
    """Consecutive deaths of graders on the first item without a result."""

    @property
    def missing(self) -> int:
        return len(self.items) - len(self.results)


class GradingPool:
    """Grades completions in child processes with limits on time and memory.

    Use it from one event loop, as ``async with GradingPool(...) as pool``. The process may have threads.

    Args:
        workers: number of graders. One grader grades one group.
        timeout_seconds: wall-clock time for one completion; a grader that takes longer is killed and
            replaced.
        memory_bytes: limit on a grader's allocations after its fork (address space, RLIMIT_AS).
        start_timeout_seconds: limit on the fork server's start, with the opening of the verifier.
        show_output: whether what the verifier prints goes to standard error.
        back_off_seconds: before the second attempt to start a grader; it doubles with each.
    """

    problem = ""
    """Nothing makes groups wait."""

    def __init__(
        self,
        verifier: VerifierConfig,
        *,
        workers: int = 1,
        timeout_seconds: float = 10.0,
        memory_bytes: int = 1 << 30,
        start_timeout_seconds: float = 60.0,
        show_output: bool = False,
        back_off_seconds: float = 0.1,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}, must be at least 1")
        if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise ValueError(f"timeout_seconds is {timeout_seconds}, must be positive")
        if memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(f"memory_bytes is {memory_bytes}, must be at least {MIN_MEMORY_BYTES} (64 MiB)")
        self.counts = PoolCounts()
        self.part_names: tuple[str, ...] = ()
        """Parts of every verdict, as the verifier declares them; known once the pool has started."""
        self._setup = Setup(verifier, Limits(timeout_seconds, memory_bytes), show_output)
        self._whole = False
        self._workers = workers
        self._start_timeout_seconds, self._back_off_seconds = start_timeout_seconds, back_off_seconds
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._server: ForkServer | None = None
        self._server_lock = asyncio.Lock()
        self._slots: list[asyncio.Task[None]] = []
        self._closed = False
        self._broken: GradingError | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
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
        self.part_names, self._whole = self._server.part_names, self._server.whole
        self._slots = [
            asyncio.create_task(self._run_slot(), name=f"grading-slot-{slot}")
            for slot in range(self._workers)
        ]

    async def aclose(self) -> None:
        """End all processes; waiting groups get a GradingError."""
        self._closed = True
        await cancel(*self._slots)
        if self._server is not None:
            await self._server.close()
        self._fail_waiting(GradingError("the grading pool was closed"))

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        """Grade completions of one prompt; returns results in their order.

        ``in_thought``: the prompt opened a thought, so the completions begin inside it.

        A completion whose grading fails has no verdict and an error. Cancelling the call is safe.

        Raises:
            GradingError: the pool is closed, or its processes cannot be kept running. Nothing was graded.
            TypeError, AttributeError, pickle.PicklingError: the prompt's metadata cannot be pickled.
        """
        self._check_running()
        if not completions:
            return []
        texts = [THOUGHT + text for text in completions] if in_thought else list(completions)
        job = _Job(prompt, texts, asyncio.get_running_loop().create_future(), on_graded)
        self._jobs.put_nowait(job)
        return await job.done

    async def check(self, prompts: Sequence[Prompt], on_checked: Callable[[str | None], None]) -> None:
        """Check prompts with the verifier. ``on_checked`` is called for each, in their order, with the reason why it cannot be
        graded, or None; it must not raise.

        One grader checks them all, each within the time of a completion. A prompt whose check exceeds the limits cannot be
        graded.

        Raises: as :meth:`score_group`.
        """
        self._check_running()
        job = _Job(None, list(prompts), asyncio.get_running_loop().create_future(), None)
        job.on_graded = lambda: on_checked(job.results[-1].error)
        self._jobs.put_nowait(job)
        await job.done

    def _check_running(self) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._slots or self._closed:
            raise GradingError("the grading pool is not running; use it inside `async with`")

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
                    self._fail_waiting(error)
                except Exception as error:  # a prompt that cannot be pickled fails only its caller
                    _fail(job, error)
                else:
                    if not job.done.done():
                        job.done.set_result(job.results)
        finally:
            if grader is not None:
                grader.close()

    async def _grade(self, job: _Job, grader: Grader | None) -> Grader | None:
        """Fill ``job.results``; returns a grader that can take the next job, if any."""
        try:
            while job.missing and not job.done.done():
                request, expected = _next_request(job, self._whole)
                if not expected:
                    self._record(job, _too_long(job.items[len(job.results)]))
                    continue
                if grader is None:
                    grader = await self._fork()
                if not await self._grade_request(job, request, expected, grader):
                    self._kill(grader)
                    grader = None
        except BaseException:
            if grader is not None:
                self._kill(grader)
            raise
        return grader

    async def _grade_request(
        self, job: _Job, request: Request | CheckRequest, expected: int, grader: Grader
    ) -> bool:
        """Grade the ``expected`` items of one request, as far as possible; False if the grader cannot be used again.

        Every call grades an item or counts a death against one, so repeated calls end.
        """
        grader.send(request)
        before = len(job.results)
        in_time = await self._collect(grader, job, expected)
        if len(job.results) > before:
            job.deaths = 0
        if not in_time:
            self.counts.timeouts += 1
            seconds = self._setup.limits.timeout_seconds
            self._fail_next(
                job, f"grading{_for(self._setup, job)} took longer than {seconds:g} s and was killed"
            )
            return False
        if len(job.results) < before + expected and not grader.retired:
            self.counts.deaths += 1
            job.deaths += 1
            if job.deaths >= _MAX_DEATHS:
                what = "group" if self._whole else "completion"
                own = _for(self._setup, job)
                self._fail_next(job, f"the grader{own} died {job.deaths} times on this {what}")
                job.deaths = 0
        return not grader.ended

    async def _collect(self, grader: Grader, job: _Job, count: int) -> bool:
        """Collect records until there are ``count`` or the grader ends; False when one is overdue.

        Those of a group that is scored as a whole count together: a part of them would leave another group to score again.
        """
        taken, whole = 0, self._whole and job.prompt is not None
        while True:
            held = whole and len(grader.results) < count and not grader.retired
            for score, parts, answered, error, messages in [] if held else grader.results[taken:]:
                verdict = Verdict(score, dict(zip(self.part_names, parts, strict=False)), answered)
                said, reward = read_content(messages) if messages else ((), 0.0)
                self._record(job, Graded(verdict if error is None else None, error, said, reward))
                taken += 1
            if taken >= count or grader.ended:
                return True
            if not await grader.changed(self._setup.limits.timeout_seconds):
                return False

    def _fail_next(self, job: _Job, error: str) -> None:
        """Record an error of the next item, or of all of a group that is scored as a whole."""
        for _ in range(job.missing if self._whole and job.prompt is not None else 1):
            self._record(job, Graded(None, error))

    def _record(self, job: _Job, graded: Graded) -> None:
        job.results.append(graded)
        self.counts.graded += 1
        self.counts.errors += graded.error is not None
        if job.on_graded is not None:
            job.on_graded()

    def _kill(self, grader: Grader) -> None:
        if self._server is not None:
            self._server.kill(grader)
        else:  # it died with its server, which is being replaced
            grader.close()

    # --- the fork server ------------------------------------------------------------------------

    async def _fork(self) -> Grader:
        """A new grader; replaces a dead fork server, with back-off and a limit."""
        for attempt in range(_MAX_FORK_ATTEMPTS):
            try:
                async with self._server_lock:
                    server = await self._running_server()
                grader = await server.fork()
            except GradingError as error:
                last = error
                await asyncio.sleep(self._back_off_seconds * 2**attempt)
            else:
                self.counts.forks += 1
                return grader
        raise GradingError(f"no grader after {_MAX_FORK_ATTEMPTS} attempts: {last}") from last

    async def _running_server(self) -> ForkServer:
        if self._server is None or self._server.dead:
            if self._server is not None:
                await self._server.close()
                self._server = None
            self._server = await ForkServer.start(self._setup, self._start_timeout_seconds)
        return self._server

    def _fail_waiting(self, error: GradingError) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                _fail(self._jobs.get_nowait(), error)


def _fail(job: _Job, error: Exception) -> None:
    if not job.done.done():
        job.done.set_exception(error)


def _for(setup: Setup, job: _Job) -> str:
    """Which function of the user, and which prompt, for an error."""
    own = setup.verifier.python or setup.verifier.plugin or setup.verifier.environment
    if own is None:
        return ""
    name = own.name if isinstance(own, Plugin) else own.label
    return f" by {name}" + (f" of the prompt {job.prompt.id}" if job.prompt is not None else "")


def _next_request(job: _Job, whole: bool) -> tuple[Request | CheckRequest, int]:
    """The next items as one request, and their number; 0 if the next completion is too long to be graded. ``whole``: all items,
    unless one of them is too long.
    """
    if job.prompt is None:
        prompts = [item for item in job.items[len(job.results) :] if isinstance(item, Prompt)]
        return CheckRequest(prompts), len(prompts)
    chosen: list[str] = []
    characters = 0
    for completion in job.items[len(job.results) :]:
        assert isinstance(completion, str)
        characters += len(completion)
        too_many = chosen and not whole and characters > _MAX_REQUEST_CHARACTERS
        if len(completion) > MAX_COMPLETION_CHARACTERS or too_many:
            break
        chosen.append(completion)
    return Request(job.prompt, chosen), len(chosen)


def _too_long(completion: str | Prompt) -> Graded:
    assert isinstance(completion, str)
    return Graded(
        None,
        f"a completion of {len(completion):,} characters is over the limit of {MAX_COMPLETION_CHARACTERS:,}",
    )
