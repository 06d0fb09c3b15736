"""``spec.generator.speculation`` and the messages about past responses."""

from __future__ import annotations

import msgspec
import pytest
from invalid_specs import merged
from pydantic import ValidationError
from spec_edits import BASE

from scalerl_api import wire
from scalerl_api.spec import ScaleRLRun


def generator(**section: object) -> ScaleRLRun:
    return ScaleRLRun.model_validate(merged(BASE, {"spec": {"generator": section}}))


def test_speculation_is_off_by_default_and_has_defaults_when_on() -> None:
    assert generator().spec.generator.speculation is None
    on = generator(speculation={"history": {}}).spec.generator.speculation
    assert on is not None
    assert on.history is not None
    assert on.history.store_size == "8Gi"


@pytest.mark.parametrize(
    ("sequences", "completion", "tokens"),
    [(256, 1024, 4_000_000), (256, 16_384, 8_388_608), (65_536, 32_768, 2_000_000_000)],
)
def test_memory_of_drafts_follows_what_runs(sequences: int, completion: int, tokens: int) -> None:
    changes: dict[str, object] = {
        "model": {"contextTokens": 65_536},
        "recipe": {"maxCompletionTokens": completion},
        "generator": {
            "maxConcurrentSequences": sequences,
            "speculation": {"history": {}},
        },
    }
    assert ScaleRLRun.model_validate(merged(BASE, {"spec": changes})).spec.draft_memory_tokens == tokens
    assert generator().spec.draft_memory_tokens == 0


@pytest.mark.parametrize(
    "option", ["--speculative-config={}", "--speculative_config", "--spec-method=ngram", "-sc"]
)
def test_speculation_in_two_places_is_refused(option: str) -> None:
    generator(extraArgs=["--max-logprobs=1", option])
    generator(extraArgs=["--enforce-eager"], speculation={"history": {}})
    with pytest.raises(ValidationError, match=r"generator\.extraArgs and generator\.speculation both"):
        generator(extraArgs=["--max-logprobs=1", option], speculation={"history": {}})


def test_responses_are_the_same_after_the_wire() -> None:
    prompt = wire.PromptRef(1, wire.Split.TRAIN, 7)
    request = wire.ResponsesRequest(prompt=prompt, digest=wire.prompt_digest(bytes(8)))
    answer = wire.Responses(responses=[wire.PastResponse(3, bytes(4))])
    for message in (request, answer):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
