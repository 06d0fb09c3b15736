"""Episodes with calls of tools, by a scripted model and the tools and graders of a run: their tokens, counts, and continuation."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from actor_stand_ins import CHARACTERS, END, TOKEN, write_tokenizer
from aiohttp import web
from test_generator_episodes import MAX_TOKENS, PROMPT_IDS, ModelServer, Reply, handed_over
from test_generator_streams import Bench

from scalerl_api.source import EvaluationTaskSpec
from scalerl_api.spec import PromptSpec
from scalerl_generator.rollouts.episodes import EpisodeSampler
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.server_state import BusyClock
from scalerl_tasks import Prompt, open_grading_pool
from scalerl_tasks.environments.gate import EnvironmentGate
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.open_graders import open_episodes

PROMPT = Prompt("p", "345", "4")
PARAMETERS = {"tools": [{"calculator": {"name": "c"}}, {"python": {"name": "p"}}], "format": "Text"}
SECTION = EvaluationTaskSpec.model_validate(
    {
        "jsonl": {"path": "unused.jsonl"},
        "verifier": {"name": "number"},
        "environment": {"name": "tools", "parameters": PARAMETERS, "maxTurns": 4},
    }
)
SAID = {
    "c: 2+2": ["4"],
    "well\nc:1/8": ["0.125"],
    "c: 1/0": ["error: division by zero"],
    "p: str().join(map(chr, (60, 101, 111, 115, 62)))": ["<eos>"],
    "c: 1\nc: 2": ["1", "2"],
}
ANSWERS = {"it is 4": 1.0, "4": 1.0, "5": 0.0, "none": 0.0}
MARK = "="


def ids_of(text: str) -> list[int]:
    return [2 + CHARACTERS.index(character) for character in text]


def scripted(prompt: Sequence[int], body: list[int]) -> tuple[int, float]:
    """The next token: of a call or an answer, by all tokens before the reply."""
    start = 0
    if END in body:
        start = len(body) - body[::-1].index(END)
        marks = [at for at, id_ in enumerate(body) if id_ == ids_of(MARK)[0]]
        start = marks[-1] + 1  # a message ends with the mark, which no reply has
    draw = random.Random(repr((list(prompt), body[:start])))
    text = draw.choice([*SAID, *SAID, *ANSWERS])
    reply = [*ids_of(text), END]
    at = len(body) - start
    return reply[at], -random.Random(repr(body)).randrange(1, 64) / 64


class ScriptedServer(ModelServer):
    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params, prompt = body["sampling_params"], body["token_ids"]
        self.requests.append(params)
        first, before = prompt[: len(PROMPT_IDS) + 1], prompt[len(PROMPT_IDS) + 1 :]
        reply = Reply()
        reply.logprobs = []
        while len(reply) < params["max_tokens"] and (not reply or reply[-1] != END):
            token, logprob = scripted(first, [*before, *reply])
            reply.append(token)
            reply.logprobs.append(logprob)
        if body.get("stream"):
            return await self.stream(request, [reply], params)
        return web.json_response({"choices": self.choices([reply], params, await self.decode(0, len(reply)))})


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.server = ScriptedServer(TOKEN, 0.0)
    await bench.start()
    yield bench
    await bench.end()


@pytest.fixture
def codec(tmp_path: Path) -> PromptCodec:
    write_tokenizer(tmp_path)
    prompt = PromptSpec(template="{prompt}" + MARK)
    return PromptCodec(tmp_path, prompt, 4096, tools=tools_of(SECTION.environment))


def check(completion: PartialCompletion, codec: PromptCodec) -> int:
    """Messages are what the tools say to each reply; returns the number of calls."""
    ids, start, calls = completion.token_ids.tolist(), 0, 0
    for turn in completion.turns:
        assert ids[turn.start - 1] == END
        (reply,) = codec.texts([completion.token_ids[start : turn.start]])
        assert codec.tokenizer.texts([ids[turn.start : turn.end]]) == ["".join(t + MARK for t in SAID[reply])]
        assert END not in ids[turn.start : turn.end], "what a tool prints is text"
        calls += len(SAID[reply])
        start = turn.end
    (last,) = codec.texts([completion.token_ids[start:]])
    cut = completion.finish_reason == "length"
    assert completion.outcome is not None
    assert completion.outcome.verdict is not None, completion.outcome.error
    if not cut:
        calls += len(SAID.get(last, ()))
        assert completion.outcome.score == ANSWERS.get(last, 0.0)
        assert completion.outcome.verdict.parts == {"calls": calls, "malformed": 0}
    assert not completion.outcome.messages
    return int(completion.outcome.verdict.parts["calls"])


async def test_calls_are_made_between_replies_and_anywhere_continued(
    bench: Bench, codec: PromptCodec
) -> None:
    """The next actor makes the same messages, wherever the report of an actor ends."""
    calls, turns, tried = 0, set[int](), 0
    async with open_grading_pool(SECTION) as pool:
        environment = open_episodes(SECTION, pool)
        assert environment is not None
        sampler = EpisodeSampler(
            EnvironmentGate(environment, "e"),
            codec,
            4,
            None,
            ThreadPoolExecutor(1),
            bench.metrics,
            BusyClock(),
        )
        for letter in range(2, 18):
            ids = [*PROMPT_IDS, letter]
            whole = bench.streams(ids, 1, max_tokens=MAX_TOKENS)
            await sampler.sample(whole, PROMPT)
            (expected,) = whole.completions
            calls += check(expected, codec)
            turns.add(len(expected.turns))
            for tokens in {*range(1, expected.tokens, 9), *(t.end for t in expected.turns), expected.tokens}:
                if any(turn.start < tokens < turn.end for turn in expected.turns):
                    continue
                streams = bench.streams(ids, 1, max_tokens=MAX_TOKENS)
                streams.completions = handed_over(expected, tokens, whole)
                await sampler.sample(streams, PROMPT)
                (completion,) = streams.completions
                assert completion.token_ids.tolist() == expected.token_ids.tolist()
                assert (completion.turns, completion.outcome) == (expected.turns, expected.outcome)
                calls += check(completion, codec)
                tried += 1
    assert {0, 3} <= turns
    assert tried > 60
    counted = bench.metrics.tool_calls.labels("made")._value.get()
    assert counted == calls
    assert bench.metrics.tool_calls.labels("malformed")._value.get() == 0
