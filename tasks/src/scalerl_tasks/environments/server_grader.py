"""``environment.url``: the steps of episodes, by a server that speaks OpenEnv's protocol.

An episode has no state but its replies. A session of the server is a cache: it is found by the prompt and the replies that it was
given, and where there is none, the episode is played again in another session.

====================================================  ============================================================
state of the server                                   effect
====================================================  ============================================================
a session is lost                                     its episode is played again
no connection, no answer in time, an error, an        its episodes wait, with back-off, as long as it takes;
answer that is not OpenEnv's, other schema            :attr:`ServerGrader.problem` says why
one episode fails alone :data:`_RETRIES` times        it has no verdict
(:data:`_RAISES` if the environment raises), while
another one is answered
another answer to the same replies, a reward out of   the same, at once
its range, a message that is too long
a reply that is no valid action                       a message that says so, and the lowest reward, or the sum so far
a field of the parameters is not in its schema        :class:`~.server_settings.Unfit`, which ends the run
====================================================  ============================================================
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from scalerl_api.http_answers import IDENTITY
from scalerl_api.http_client import open_session
from scalerl_processes.waiting import calling, pause
from scalerl_tasks.environments.openenv import Observed, Session
from scalerl_tasks.environments.openenv_schema import Schema, encoded, read_schema, reset_arguments
from scalerl_tasks.environments.protocol import Continued, Step, checked_step, read_content, read_replies
from scalerl_tasks.environments.server_settings import (
    TOKEN,
    Address,
    Down,
    EnvironmentServer,
    Failed,
    Full,
    Lost,
    Raised,
    Unfit,
)
from scalerl_tasks.environments.sessions import Sessions
from scalerl_tasks.environments.timings import TIMINGS, Timings
from scalerl_tasks.errors import GradingError, VerifierError
from scalerl_tasks.grading.grading_pool import Graded, PoolCounts, Tick
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import REWARD, SCORE_RANGE

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("scalerl_tasks.environments.server_grader")

_RETRIES: Final = 5
_RAISES: Final = 2
_MAX_KNOWN: Final = 1 << 16


class ServerGrader:
    """Makes steps by a server; the interface of :class:`~scalerl_tasks.grading.grading_pool.GradingPool`, whose completions are
    :func:`~.protocol.write_replies` of episodes. Use it from one event loop.
    """

    def __init__(self, server: EnvironmentServer, timings: Timings = TIMINGS) -> None:
        self._server, self._timings = server, timings
        self.part_names: tuple[str, ...] = () if server.range == SCORE_RANGE else (REWARD,)
        self.counts = PoolCounts()
        self.problem = ""
        self._http: aiohttp.ClientSession | None = None
        self._schema: Schema | None = None
        self._sessions = Sessions(server, timings)
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        """Digests of answers, by the replies before them."""
        self._answered: tuple[Prompt, Sequence[str]] | None = None
        """An episode that had an answer, to ask whether the server works."""
        self._recovering, self._recovered = asyncio.Lock(), asyncio.Event()
        self._recoveries, self._answers, self._delay = 0, 0, timings.first_back_off

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = dict(IDENTITY)
        if token := os.environ.get(TOKEN, ""):
            headers["authorization"] = f"Bearer {token}"
        self._http = open_session(headers, aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sessions.aclose()
        if self._http is not None:
            await self._http.close()
        self._http = None

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        """The step after the last reply of each episode. Waits while the server is down, and calls ``on_graded`` every second
        meanwhile, so that the lease is kept.

        Raises:
            Unfit
        """
        async with calling(on_graded or (lambda: None), self._timings.waiting):
            return list(await asyncio.gather(*(self._step(prompt, read_replies(one)) for one in completions)))

    async def check(self, prompts: Sequence[Prompt], on_checked: Callable[[str | None], None]) -> None:
        """Nothing: a run that waits for its server is not checked by it."""
        for _ in prompts:
            on_checked(None)

    # --- steps ----------------------------------------------------------------------------------

    async def _step(self, prompt: Prompt, replies: Sequence[str]) -> Graded:
        failures, started, waited = 0, time.monotonic(), 0.0
        while True:
            try:
                graded = await self._played(prompt, replies)
            except Unfit:
                raise
            except VerifierError as error:
                return self._counted(Graded(None, f"{error} (prompt {prompt.id})", waited=waited))
            except Down as error:
                if await self._is_down(error):
                    waited = time.monotonic() - started
                    continue
                failures += 1
                if failures >= (_RAISES if isinstance(error, Raised) else _RETRIES):
                    return self._counted(Graded(None, f"{error} (prompt {prompt.id})", waited=waited))
                await asyncio.sleep(self._timings.first_back_off * 2**failures)
            else:
                self._up()
                self._answers += 1
                self._answered = prompt, replies[:1]
                return self._counted(replace(graded, waited=waited))

    def _counted(self, graded: Graded) -> Graded:
        self.counts.graded += 1
        self.counts.errors += graded.error is not None
        return graded

    async def _played(self, prompt: Prompt, replies: Sequence[str]) -> Graded:
        """The step after the last reply, in a session that has the earlier ones, or is given them.

        Raises:
            Down, Failed, Unfit
        """
        keys = _keys(prompt, replies)
        while True:
            session, reused = await self._session(keys[-2])
            try:
                first = len(replies) - 1
                if session.key != keys[-2]:
                    await session.reset(prompt)
                    self._sessions.answered(session)
                    first = 0
                for at in range(first, len(replies)):
                    observed = await session.step(replies[at])
                    self._same(keys[at + 1], observed)
                    if observed.done and at + 1 < len(replies):
                        raise Failed(f"{self._server.where} ended an episode before its last reply")
                graded = self._graded(observed, session)
                session.key = b"" if observed.done else keys[-1]
            except Lost:
                if reused:
                    await self._sessions.drop(session)
                    continue
                await self._sessions.failed(session)
                raise
            except Full as error:
                if not await self._sessions.full(session, error.taken):
                    raise
            except Raised:
                await self._sessions.drop(session)
                raise
            except Down:
                await self._sessions.failed(session)
                raise
            except BaseException:
                await self._sessions.drop(session)
                raise
            else:
                await self._sessions.release(session)
                return graded

    async def _session(self, key: bytes) -> tuple[Session, bool]:
        """A session, and whether it was there. One of another version of the server is refused."""
        while True:
            found = await self._sessions.take(key)
            if isinstance(found, Session):
                return found, True
            try:
                return await self._opened(found.address), False
            except Down:
                if not await self._sessions.failed(found):
                    raise
            except BaseException:
                await self._sessions.drop(found)
                raise

    async def _opened(self, address: Address) -> Session:
        if self._http is None:
            raise GradingError("the environment's sessions were closed")
        schema = await read_schema(self._http, self._server, address)
        if self._schema is not None and schema.digest != self._schema.digest:
            raise Down(
                f"{self._server.where} has other actions or observations than before: another version? Start the one that the "
                "run began with"
            )
        if schema.problem:
            raise Unfit(schema.problem)
        self._schema = self._schema or schema
        return await Session.open(self._http, self._server, schema, address)

    def _same(self, key: bytes, observed: Observed) -> None:
        """Check that the same replies are answered as before; of older answers than the last ``_MAX_KNOWN`` that is not known."""
        digest = hashlib.blake2b(repr(observed).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if self._known.setdefault(key, digest) != digest:
            raise Failed(
                f"{self._server.where} answered the same replies in another way than before: it has to draw from the seed of its "
                "reset alone, and may not be replaced by another version"
            )
        self._known.move_to_end(key)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _graded(self, observed: Observed, session: Session) -> Graded:
        low, high = self._server.range
        reward = observed.reward
        if self._server.total:
            reward = sum(session.rewards) if session.rewards else None
        if observed.done and reward is None:
            raise Failed(
                f"{self._server.where} ended an episode without a reward, or with one that is no number"
            )
        # The lowest without a reward, so that it does not pay to let the turns run out.
        if reward is None or (observed.invalid and not self._server.total):
            reward = low
        if self._server.total and not observed.done:  # a sum may leave the range on the way
            reward = min(max(reward, low), high)
        turn = min(max(observed.reward or 0.0, low - high), high - low) if self._server.total else 0.0
        step = Step([observed.message], observed.done, reward, turn_reward=turn)
        try:
            found = checked_step(step, self._server.where, self.part_names, self._server.range)
        except ValueError as error:
            text = str(error).replace("the verifier", self._server.where, 1)
            raise Failed(f"{text} (parameters.range)") from None
        if isinstance(found, Continued):
            return Graded(found.verdict, None, *read_content(found.content))
        return Graded(found)

    # --- health ---------------------------------------------------------------------------------

    async def _is_down(self, error: Down) -> bool:
        """Whether the server also fails for other episodes; waits if so. One without free sessions does."""
        recoveries, answers = self._recoveries, self._answers
        async with self._recovering:  # one try at a time
            if self._recoveries != recoveries:
                return True
            is_full = isinstance(error, Full)
            # What raises has no part in other sessions, so that their answers tell that the server works.
            answered = isinstance(error, Raised) and self._answers != answers
            if not is_full and (answered or await self._works()):
                self._up()
                return False
            if not self.problem:
                log.warning("%s; episodes wait", error)
                self._recovered.clear()
            self.problem = str(error)
            longest = self._timings.full_back_off if is_full else self._delay
            await pause(min(self._delay, longest), until=self._recovered)
            self._delay = min(self._timings.max_back_off, 2 * self._delay)
            return True

    async def _works(self) -> bool:
        """Whether it answers an episode that it has answered before; another answer than before is one."""
        if self._answered is None:
            return False
        try:
            await self._played(*self._answered)
        except Down:
            return False
        except VerifierError:
            pass
        return True

    def _up(self) -> None:
        if self.problem:
            log.info("%s answers again", self._server.where)
            self._recoveries += 1
        self.problem, self._delay = "", self._timings.first_back_off
        self._recovered.set()


def _keys(prompt: Prompt, replies: Sequence[str]) -> list[bytes]:
    """A key of the episode before its first reply, and after each, shape ``[replies + 1]``.

    Tasks and sets with one environment share a grader, and ids are unique within a source only: keys are of all that a reset sends.

    Raises:
        Failed
    """
    keys = [hashlib.blake2b(encoded(reset_arguments(prompt)).encode(), digest_size=16).digest()]
    for reply in replies:
        text = reply.encode("utf-8", "surrogatepass")
        keys.append(hashlib.blake2b(text, key=keys[-1], digest_size=16).digest())
    return keys
