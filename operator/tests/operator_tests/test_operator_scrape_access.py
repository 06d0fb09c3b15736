"""Who may read the operator's metrics, and how often the API server is asked. (With a real one: tests/cluster/test_scrape_access.py.)"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scalerl_operator.kube import errors
from scalerl_operator.kube.scrape_access import FRESH_SECONDS, MAX_ANSWERS, ScrapeAccess


class Api:
    """Knows the tokens ``good`` (may scrape) and ``other`` (may not)."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away, self.at_once, self.most_at_once = False, 0, 0

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
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


async def test_many_tokens_cost_one_call_at_a_time_and_bounded_memory(api: Api) -> None:
    access = ScrapeAccess(api, lambda: 0.0)  # type: ignore[arg-type]
    assert await access.status("Bearer good") == 200
    tried = await asyncio.gather(*(access.status(f"Bearer {n}") for n in range(1000)))
    assert set(tried) == {401}
    assert api.most_at_once == 1
    assert len(access._answers) <= MAX_ANSWERS
    asked = len(api.asked)
    assert await access.status("Bearer good") == 200
    assert len(api.asked) == asked, "its answer is kept"
