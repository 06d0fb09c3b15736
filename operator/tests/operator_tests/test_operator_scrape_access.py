"""Who may read the operator's metrics, and how often the API server is asked. (With a real one: tests/cluster/test_scrape_access.py.)"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from operator_tests.virtual_time import run
from scalerl_operator.kube import errors
from scalerl_operator.kube.scrape_access import (
    FRESH_SECONDS,
    MAX_ANSWERS,
    REFUSALS,
    REVIEWS_AT_ONCE,
    STALE_SECONDS,
    ScrapeAccess,
)


class Api:
    """Knows the tokens ``good`` (may scrape) and ``other`` (may not)."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away, self.at_once, self.most_at_once = False, 0, 0
        self.role, self.answers = True, asyncio.Event()
        self.answers.set()

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            await self.answers.wait()
        finally:
            self.at_once -= 1
        if not self.role:
            raise errors.Forbidden("tokenreviews is forbidden", code=403)
        if self.away:
            raise errors.Unreachable("no connection")
        self.asked.append(obj["kind"])
        if obj["kind"] == "TokenReview":
            token = obj["spec"]["token"]
            return {"status": {"authenticated": token in ("good", "other"), "user": {"username": token}}}
        assert obj["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"status": {"allowed": obj["spec"]["user"] == "good"}}


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        *[("", 401), ("good", 401), ("Bearer ", 401), ("Basic good", 401), ("Bearer bad", 401)],
        *[("Bearer other", 403), ("Bearer good", 200), ("bearer good", 200), (f"Bearer {'x' * 20_000}", 401)],
    ],
)
async def test_status_of_a_scrape(api: Api, header: str, status: int) -> None:
    assert await ScrapeAccess(api).status(header) == status  # type: ignore[arg-type]
    assert ("TokenReview" in api.asked) == (header.lower().startswith("bearer ") and 7 < len(header) < 10_000)


async def test_answers_count_for_a_minute(api: Api) -> None:
    now = 0.0
    access = ScrapeAccess(api, lambda: now)  # type: ignore[arg-type]
    for _ in range(3):
        assert [await access.status(f"Bearer {token}") for token in ("good", "other", "bad")] == [
            200,
            403,
            401,
        ]
    assert len(api.asked) == 5
    now = FRESH_SECONDS
    api.away = True
    assert [await access.status(f"Bearer {token}") for token in ("good", "other", "bad")] == [200, 503, 503]
    api.away = False
    assert await access.status("Bearer good") == 200
    assert len(api.asked) == 7


async def test_allowed_token_is_served_for_an_hour_of_an_outage(api: Api) -> None:
    now = 0.0
    access = ScrapeAccess(api, lambda: now)  # type: ignore[arg-type]
    assert await access.status("Bearer good") == 200
    api.away, now = True, STALE_SECONDS - 1
    assert await access.status("Bearer good") == 200
    now = STALE_SECONDS
    assert await access.status("Bearer good") == 503


def test_slow_review_does_not_hold_up_the_others(api: Api) -> None:
    """Neither those beside it nor, however many tokens are tried, one that was allowed before."""

    async def ask_for_many() -> None:
        now = 0.0
        access = ScrapeAccess(api, lambda: now)  # type: ignore[arg-type]
        assert await access.status("Bearer good") == 200
        now = FRESH_SECONDS
        api.answers.clear()
        tried = [asyncio.create_task(access.status(f"Bearer {n}")) for n in range(100)]
        scrapes = [asyncio.create_task(access.status("Bearer good")) for _ in range(2)]
        while api.at_once < REVIEWS_AT_ONCE + len(scrapes):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert set(await asyncio.gather(*scrapes)) == {200}, "it was allowed a minute ago"
        assert set(await asyncio.gather(*tried)) == {503}
        assert api.most_at_once == REVIEWS_AT_ONCE + len(scrapes)
        assert api.at_once == 0

    run(ask_for_many())


async def test_operator_that_may_not_ask_is_no_outage(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    access = ScrapeAccess(api, lambda: now)  # type: ignore[arg-type]
    assert await access.status("Bearer good") == 200
    api.role, now = False, FRESH_SECONDS
    assert [await access.status(f"Bearer {token}") for token in ("good", "other", "good")] == [500] * 3
    assert caplog.text.count("tokenreviews is forbidden") == 1
    assert "ClusterRole" in REFUSALS[500]
    api.role = True
    assert await access.status("Bearer good") == 200


async def test_many_tokens_cost_few_calls_at_a_time_and_bounded_memory(api: Api) -> None:
    access = ScrapeAccess(api, lambda: 0.0)  # type: ignore[arg-type]
    assert await access.status("Bearer good") == 200
    tried = await asyncio.gather(*(access.status(f"Bearer {n}") for n in range(1000)))
    assert set(tried) == {401}
    assert api.most_at_once <= REVIEWS_AT_ONCE
    assert len(access._answers) <= MAX_ANSWERS
    asked = len(api.asked)
    assert await access.status("Bearer good") == 200
    assert len(api.asked) == asked, "its answer is kept"
