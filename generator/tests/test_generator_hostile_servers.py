"""What answers the actor may be hostile: the coordinator's, vLLM's and the teacher's address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hostile_server import MARK, REDIRECTS, Hostile

from scalerl_api.http_client import open_session
from scalerl_api.recipe import TeacherSpec
from scalerl_generator import coordinator_client, vllm_client
from scalerl_generator.coordinator_client import CoordinatorClient, CoordinatorError
from scalerl_generator.rollouts import teacher
from scalerl_generator.rollouts.teacher import Teacher, _Models
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import VllmError

ATTACKS = ("gzip", "deflate", "endless", "endless-error", "announced", "deep", *REDIRECTS)


async def ask_coordinator(url: str) -> None:
    async with open_session() as session:
        await CoordinatorClient(session, url, "t").responses(cast(Any, None), b"")


async def ask_vllm(url: str) -> None:
    async with VllmClient(url, "t") as client:
        await client.weight_version()


async def ask_vllm_to_stream(url: str) -> None:
    async with VllmClient(url, "t") as client:
        await client.stream([1], n=1, max_tokens=4, on_part=lambda index, part: None, timeout_seconds=10.0)


async def ask_teacher(url: str) -> None:
    spec = TeacherSpec.model_validate({"url": url, "model": "m"})
    async with open_session() as session:
        await Teacher(session, spec, "k", cast(Any, SimpleNamespace()))._read("/v1/models", None, _Models)


CLIENTS = (ask_coordinator, ask_vllm, ask_vllm_to_stream, ask_teacher)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)
async def test_answer_is_bounded_and_no_redirect_is_followed(
    ask: Callable[[str], Awaitable[None]], attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (coordinator_client, teacher, vllm_client):
        monkeypatch.setattr(module, "_MAX_ANSWER_BYTES", 2**22)
    monkeypatch.setattr("scalerl_generator.vllm_replies._MAX_EVENT_BYTES", 2**22)
    other = Hostile("valid")
    async with other.serving() as target, Hostile(attack, f"{target}/x").serving() as url:
        with pytest.raises((CoordinatorError, VllmError)) as refused:
            await ask(url)
    assert other.requests == 0
    assert len(str(refused.value)) < 1000
    if ask in (ask_coordinator, ask_teacher):
        assert MARK not in str(refused.value)
    if attack in ("gzip", "deflate") and ask is not ask_vllm_to_stream:
        assert "compressed" in str(refused.value)
    if attack in ("endless", "announced") and ask is not ask_vllm_to_stream:
        assert "more than 4194304 bytes" in str(refused.value)
