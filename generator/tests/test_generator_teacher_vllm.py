"""The teacher's client against a real vLLM server, as anyone would start one."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from actor_stand_ins import CHARACTERS, END, write_tokenizer
from plain_server import plain_server
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_api.recipe import TeacherSpec
from scalerl_api.spec import PromptSpec
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.teacher import Teacher, UnfitTeacher
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_replies import Sampled, ServerRefused
from scalerl_tasks.tokenizer import ModelTokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KEY = "of-the-teacher"
CONTEXT = 127
"""``model.contextTokens`` of the student; the server has one more."""


@pytest.fixture(scope="module")
def policy() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,  # far from uniform
        eos_token_id=END,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(policy: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    policy.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with plain_server(model, context_tokens=CONTEXT + 1, key=KEY, log=model / "server.log") as answering:
        yield answering


@pytest.fixture
async def teacher(url: str) -> AsyncIterator[Teacher]:
    async with aiohttp.ClientSession() as session:
        yield Teacher(session, TeacherSpec(url=url), KEY, ActorMetrics(ServerState(), BusyClock()))


def student(model: Path) -> ModelTokenizer:
    return ModelTokenizer(model, PromptSpec())


def sampled(random: np.random.Generator, tokens: int, masked: int = 0) -> Sampled:
    ids = random.integers(2, len(CHARACTERS) + 2, tokens).astype(np.int32)
    mask = np.arange(tokens) < masked
    return Sampled(ids, np.zeros(tokens, np.float32), mask, (), "stop")


def forward(policy: LlamaForCausalLM, prompt: list[int], completion: Sampled) -> np.ndarray[Any, Any]:
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        rows = policy(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    found: np.ndarray[Any, Any] = rows.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return np.where(completion.masked, 0.0, found)


async def test_scores_are_those_of_a_forward_pass(
    teacher: Teacher, policy: LlamaForCausalLM, model: Path
) -> None:
    await teacher.check(student(model), CONTEXT)
    random = np.random.default_rng(0)
    prompt = random.integers(2, len(CHARACTERS) + 2, 7).tolist()
    # The longest fills the student's context. Equal beginnings: the server's prefix cache has the last one's.
    completions = [*(sampled(random, n) for n in (1, 2, 30, CONTEXT - 7)), sampled(random, 9, masked=4)]
    completions.append(completions[2])
    found = await teacher.score(prompt, completions, lambda: None)
    for completion, logprobs in zip(completions, found, strict=True):
        np.testing.assert_allclose(logprobs, forward(policy, prompt, completion), rtol=1e-4, atol=1e-4)
    assert found[2].std() > 0.5, "a policy that is nearly uniform would show nothing"


async def test_sequence_beyond_the_context_is_refused(teacher: Teacher) -> None:
    with pytest.raises(ServerRefused, match="HTTP 400"):
        await teacher.score([5], [sampled(np.random.default_rng(0), CONTEXT)], lambda: None)


async def test_students_that_it_cannot_teach_are_refused(
    teacher: Teacher, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnfitTeacher, match=r"max_model_len of 128, .*model.contextTokens \(128\)"):
        await teacher.check(student(model), CONTEXT + 1)
    for change, says in (("exchanged", "there and .* here"), ("unprobed", "other texts")):
        other = tmp_path / change
        shutil.copytree(model, other, ignore=shutil.ignore_patterns("*.log", "*.safetensors"))
        content = json.loads((other / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        if change == "exchanged":
            vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        else:
            vocabulary["~"] = vocabulary.pop("|")
        (other / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UnfitTeacher, match=says):
            await teacher.check(student(other), CONTEXT)


async def test_wrong_key_is_refused(url: str, model: Path) -> None:
    async with aiohttp.ClientSession() as session:
        teacher = Teacher(session, TeacherSpec(url=url), "wrong", ActorMetrics(ServerState(), BusyClock()))
        with pytest.raises(UnfitTeacher, match="TEACHER_API_KEY"):
            await teacher.check(student(model), CONTEXT)
