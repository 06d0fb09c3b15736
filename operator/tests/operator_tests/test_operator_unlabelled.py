"""Names that are certainly free, by one list for all runs that start at about the same time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.unlabelled import (
    CROWDED_SECONDS,
    LIST_SECONDS,
    MAX_LIST_BYTES,
    UnlabelledNames,
)


class Api:
    """An API server with these names; an exception is raised."""

    def __init__(self, names: frozenset[str] | Exception | None) -> None:
        self.found = names
        self.lists: list[tuple[Any, ...]] = []

    async def names(self, *of: Any) -> frozenset[str] | None:
        self.lists.append(of)
        await asyncio.sleep(0.02)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Stage:
    def __init__(self, found: frozenset[str] | Exception | None) -> None:
        self.now = 100.0
        self.api = Api(found)
        self.names = UnlabelledNames(cast(KubeApi, self.api), clock=lambda: self.now)

    async def may_have(self, name: str, kind: str = "Service", namespace: str = "team") -> bool:
        return await self.names.may_have(kind, namespace, name)


async def test_one_list_answers_for_all_runs_of_a_few_seconds() -> None:
    stage = Stage(frozenset({"a"}))
    answers = await asyncio.gather(*(stage.may_have(name) for name in ("a", "b", "c")))
    stage.now += LIST_SECONDS - 0.1
    assert [*answers, await stage.may_have("a")] == [True, False, False, True]
    assert stage.api.lists == [("Service", "team", "!scalerl.dev/run", MAX_LIST_BYTES)]
    assert not await stage.may_have("b", namespace="other")
    assert not await stage.may_have("b", kind="Job")
    assert len(stage.api.lists) == 3


async def test_list_is_read_again_after_a_few_seconds() -> None:
    stage = Stage(frozenset())
    assert not await stage.may_have("a")
    stage.api.found = frozenset({"a"})
    stage.now += LIST_SECONDS
    assert await stage.may_have("a")
    assert len(stage.names._lists) == 1, "old lists are dropped"


async def test_secrets_are_never_listed() -> None:
    stage = Stage(frozenset())
    assert await stage.may_have("a", kind="Secret")
    assert stage.api.lists == []


@pytest.mark.parametrize("found", [None, errors.Forbidden("no")], ids=["too long", "forbidden"])
async def test_names_without_a_list_may_be_taken(found: Exception | None) -> None:
    stage = Stage(found)
    assert await stage.may_have("a")
    stage.now += LIST_SECONDS + CROWDED_SECONDS - 0.1
    assert await stage.may_have("a")
    assert len(stage.api.lists) == 1
    stage.now += 0.1
    assert await stage.may_have("a")
    assert len(stage.api.lists) == 2


async def test_failed_list_fails_its_callers_and_is_tried_again() -> None:
    stage = Stage(errors.Unreachable("timeout"))
    failures = await asyncio.gather(stage.may_have("a"), stage.may_have("b"), return_exceptions=True)
    assert [type(failure) for failure in failures] == [errors.Unreachable] * 2
    assert len(stage.api.lists) == 1
    stage.api.found = frozenset()
    assert not await stage.may_have("a")


async def test_cancelled_caller_leaves_the_list_to_the_others() -> None:
    stage = Stage(frozenset())
    first = asyncio.create_task(stage.may_have("a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(stage.may_have("a"))
    await asyncio.sleep(0)
    first.cancel()
    cancelled, answer = await asyncio.gather(first, second, return_exceptions=True)
    assert (type(cancelled), answer) == (asyncio.CancelledError, False)
    assert len(stage.api.lists) == 1
