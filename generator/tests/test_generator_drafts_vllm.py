"""With drafts, a real vLLM server samples what it samples without: the law of its outputs, and their log-probabilities and weight
versions across an update."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM
from vllm_with_updates import (
    TOKEN,
    Server,
    connect,
    new_weights,
    publish,
    score,
    start_server,
)

from scalerl_api.wire import prompt_digest
from scalerl_generator.drafts.draft_protocol import DraftReport, PastResponses
from scalerl_generator.rollouts.concurrency import cache_pressure
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import Sampled, read_completions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7]
WIRE = np.array(PROMPT, "<i4").tobytes()
KEY = prompt_digest(WIRE).hex()
LONG = 400
CONTEXT = 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_server(
        tmp_path_factory.mktemp("vllm"),
        tied=True,
        dtype="float32",
        fp32_head=True,
        options=["--max-draft-tokens", "8", "--draft-memory-tokens", "65536", "--stats"],
    )


def decided_weights(server: Server, seed: int, scale: float) -> LlamaForCausalLM:
    """Weights under which few tokens are likely, so that many drafts are accepted and many are not: logits are ``scale`` times
    as large."""
    policy = new_weights(server.model, seed)
    with torch.no_grad():
        policy.model.norm.weight.mul_(scale)
    return policy


def law(policy: LlamaForCausalLM, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every completion of at most ``length`` tokens; the end token ends it."""
    vocabulary = policy.config.vocab_size
    begun: dict[tuple[int, ...], float] = {(): 1.0}
    ended: dict[tuple[int, ...], float] = {}
    for _ in range(length):
        texts = list(begun)
        with torch.no_grad():
            logits = policy(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1].double()
        following: dict[tuple[int, ...], float] = {}
        for text, p_v in zip(texts, torch.softmax(logits, -1).numpy(), strict=True):
            for token in range(vocabulary):
                (ended if token == 1 else following)[*text, token] = begun[text] * float(p_v[token])
        begun = following
    return ended | begun


async def sample(client: VllmClient, *, requests: int, n: int, max_tokens: int) -> list[Sampled]:
    asked = (client.generate(PROMPT, n=n, max_tokens=max_tokens, prompt_key=KEY) for _ in range(requests))
    return list(itertools.chain(*await asyncio.gather(*asked)))


def enough(report: DraftReport) -> bool:
    """Whether so many tokens were accepted and rejected that a wrong rule of acceptance shows in the counts."""
    return report.accepted_tokens > 400 and report.drafted_tokens - report.accepted_tokens > 300


async def test_vllm_drafts_leave_the_law_of_outputs(server: Server) -> None:
    """Chi-square of at least 12,800 completions against the exact law of the model; drafts come from past responses and siblings.

    How many tokens are drafted depends on how long steps and drafts take on this machine, so sampling goes on until enough were.
    """
    policy = decided_weights(server, 3, 5.0)
    exact = law(policy, 3)
    assert sum(exact.values()) == pytest.approx(1)
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 1)
        await publish(client, sender, policy, 1)
        likely = sorted(exact, key=lambda text: exact[text])[-40:]
        past = [np.array(text, "<i4").tobytes() for text in likely]
        await client.remember(PastResponses(KEY, WIRE, past))
        completions: list[tuple[int, ...]] = []
        for round_ in range(1000):
            if round_ >= 200 and round_ % 50 == 0 and enough(await client.draft_report()):
                break
            # In small batches, where drafts pay on every machine.
            completions += [
                tuple(c.token_ids.tolist()) for c in await sample(client, requests=4, n=16, max_tokens=3)
            ]
        report = await client.draft_report()
    assert report.remembered_responses == 40
    assert enough(report), report

    counted = Counter(completions)
    assert set(counted) <= set(exact)
    expected = {text: p * len(completions) for text, p in exact.items()}
    common = [text for text in exact if expected[text] >= 5]
    observed = [counted[text] for text in common]
    awaited = [expected[text] for text in common]
    observed.append(len(completions) - sum(observed))
    awaited.append(len(completions) - sum(awaited))
    assert len(common) > 100
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, awaited, strict=True))
    assert chi2.sf(statistic, len(common)) > 1e-3, (statistic, len(common))


async def test_vllm_drafts_keep_logprobs_and_versions_across_an_update(server: Server) -> None:
    """Each token has the log-probability under the weights that the server names for it, accepted or sampled.

    A token of after the update is conditional on a prefix of which the cached part is of the weights before, so only the first
    tokens are compared exactly, and those of a completion that begins after it.
    """
    old, new = decided_weights(server, 2, 8.0), decided_weights(server, 3, 8.0)
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 2)
        await publish(client, sender, old, 2)
        before = await client.draft_report()
        published = asyncio.Event()

        async def sampled() -> list[Sampled]:
            """Until the update is there: it meets completions, however fast the machine is."""
            found = await sample(client, requests=8, n=4, max_tokens=LONG)
            while not published.is_set():
                found += await sample(client, requests=8, n=4, max_tokens=LONG)
            return found

        running = asyncio.create_task(sampled())
        async with asyncio.timeout(120):
            while not (await cache_pressure(client)).running:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        await publish(client, sender, new, 3)
        published.set()
        crossed = await running
        after = await sample(client, requests=4, n=4, max_tokens=LONG)
        report = await client.draft_report()
    assert report.accepted_tokens - before.accepted_tokens > 100, report
    divided = 0
    for completion in crossed:
        spans = completion.weight_versions
        assert spans[0].start == 0
        assert spans[-1].end == len(completion.token_ids)
        assert [span.version for span in spans] == sorted({span.version for span in spans})
        divided += len(spans) == 2
        whole = [*PROMPT, *completion.token_ids.tolist()]
        if spans[0].version == 2:
            own = score(old, whole)[len(PROMPT) - 1 :][: spans[0].end]
            np.testing.assert_allclose(completion.logprobs[: spans[0].end], own, atol=2e-3)
    assert divided, "every completion ended before the update"
    for completion in after:
        assert {span.version for span in completion.weight_versions} == {3}
        own = score(new, [*PROMPT, *completion.token_ids.tolist()])[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, own, atol=2e-3)


async def test_vllm_drafts_until_the_end_of_the_context(server: Server) -> None:
    """The second time what follows is known, and drafts would reach beyond the last position."""
    prompt = PROMPT * 330
    key = prompt_digest(np.array(prompt, "<i4").tobytes()).hex()
    most = CONTEXT - len(prompt)
    async with VllmClient(server.url, TOKEN) as client:
        for _ in range(2):
            (sampled,) = await client.generate(prompt, n=1, max_tokens=most, temperature=0.0, prompt_key=key)
            assert len(sampled.token_ids) == most
        assert sum((await client.take_draft_tally(key))[1]) > 0


async def test_vllm_samples_top_k_without_a_draft(server: Server) -> None:
    """A request without a key has no draft. vLLM's own verification of no drafted token ends the engine."""
    async with VllmClient(server.url, TOKEN) as client:
        params = {"max_tokens": 20, "temperature": 1.0, "top_k": 1, "logprobs": 0, "detokenize": False}
        body = {"token_ids": PROMPT, "sampling_params": params}
        content = await client.call("POST", "/inference/v1/generate", body, 120.0)
        (sampled,) = read_completions(content, 1)
        (greedy,) = await client.generate(PROMPT, n=1, max_tokens=20, temperature=0.0)
    assert sampled.token_ids.tolist() == greedy.token_ids.tolist()


async def test_vllm_tells_how_full_its_cache_is(server: Server) -> None:
    async with VllmClient(server.url, TOKEN) as client:
        before = await cache_pressure(client)
        pressures, rounds = [before], 0
        while max(one.running for one in pressures) < 16:  # a round may end before it was asked
            rounds += 1
            running = asyncio.create_task(sample(client, requests=2, n=8, max_tokens=LONG))
            while not running.done():
                pressures.append(await cache_pressure(client))
                await asyncio.sleep(0.02)
        after = await cache_pressure(client)
    assert max(one.running for one in pressures) == 16
    assert 0 < max(one.used for one in pressures) < 1
    assert after.ended - before.ended == 16 * rounds
    assert after.longest > 1


async def test_vllm_drafts_resume_with_their_prompt(server: Server) -> None:
    """A resumed completion's request has another prompt, and is drafted from responses to the first one."""
    async with VllmClient(server.url, TOKEN) as client:
        (begun,) = await client.generate(PROMPT, n=1, max_tokens=200, temperature=0.0, prompt_key=KEY)
        tokens = begun.token_ids.tolist()
        before = await client.draft_report()
        resumed = [*PROMPT, *tokens[:60]]
        for _ in range(20):  # drafts may pause for 512 steps, where they have not paid on this machine
            (rest,) = await client.generate(resumed, n=1, max_tokens=140, temperature=0.0, prompt_key=KEY)
            assert rest.token_ids.tolist() == tokens[60:]
            report = await client.draft_report()
            if report.accepted_tokens - before.accepted_tokens > 60:
                break
    assert report.accepted_tokens - before.accepted_tokens > 60, report
