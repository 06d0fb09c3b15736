"""Several verifiers of a task: sums, products, parts, rows where one does not apply."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.source import EvaluationTaskSpec
from scalerl_api.verifier import WeightedVerifier
from scalerl_tasks import Graded, Prompt, Verdict, VerifierError, open_grading_pool
from scalerl_tasks.grading.combined import CombinedGrader
from scalerl_tasks.open_graders import grading_digest

REWARDS = """
def format(completion):
    return 1.0 if completion.startswith("<") else 0.0

def length(completion):
    return None if completion == "skip" else -min(10, len(completion))

def fails(completion):
    raise ValueError("no")

def skips(completions):
    return [None for _ in completions]
"""
PROMPT = Prompt("a", "2 + 2?", "4")


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)

    def made(*verifiers: dict[str, Any], combine: str = "Sum") -> EvaluationTaskSpec:
        given = [
            one
            | ({"python": {"path": str(tmp_path / "rewards.py"), **one["python"]}} if "python" in one else {})
            for one in verifiers
        ]
        return EvaluationTaskSpec.model_validate(
            {"reasoningGym": {"name": "chain_sum"}, "verifiers": given, "combine": combine}
        )

    return made


async def graded(spec: EvaluationTaskSpec, *completions: str) -> tuple[tuple[str, ...], list[Graded]]:
    async with open_grading_pool(spec) as grader:
        return grader.part_names, await grader.score_group(PROMPT, list(completions))


async def test_sum_by_weight_with_ranges_and_parts(spec):
    given = spec(
        {"name": "number", "weight": 3},
        {"python": {"function": "length"}, "range": [-10, 0], "label": "brevity"},
    )
    names, found = await graded(given, "4", "12345", "skip")
    assert names == ("number", "brevity")
    assert found == [
        Graded(Verdict((3 * 1 + 0.9) / 4, {"number": 1.0, "brevity": -1.0})),
        Graded(Verdict(0.5 / 4, {"number": 0.0, "brevity": -5.0})),
        Graded(Verdict(0.0, {"number": 0.0, "brevity": 0.0})),  # of number alone
    ]


async def test_product_is_a_gate(spec):
    names, found = await graded(
        spec({"name": "number"}, {"python": {"function": "format"}}, combine="Product"), "<4", "4", "<5"
    )
    assert names == ("number", "format")
    assert [one.score for one in found] == [1.0, 0.0, 0.0]
    assert found[1].verdict == Verdict(0.0, {"number": 1.0, "format": 0.0})


async def test_an_answer_is_missing_if_one_verifier_misses_it(spec):
    format_ = {"python": {"function": "format"}, "label": "format"}
    _, found = await graded(spec({"name": "number"}, {"name": "exact"}, format_), "<4", "<x", "")
    assert [one.verdict and one.verdict.answered for one in found] == [True, False, False]
    _, found = await graded(spec(format_, format_ | {"label": "again"}), "<4")
    assert [one.verdict and one.verdict.answered for one in found] == [None]


async def test_an_error_of_one_is_no_zero(spec):
    _, found = await graded(spec({"name": "number"}, {"python": {"function": "fails"}}), "4")
    assert found[0].verdict is None
    assert (found[0].error or "").startswith(
        "fails: rewards.py:fails raised ValueError: no (rewards.py, line 9)"
    )


async def test_none_applies(spec):
    _, found = await graded(spec({"python": {"function": "skips", "signature": "group"}}), "4")
    assert found == [Graded(None, "not applicable: the verifier gave None")]


async def test_labels_differ(spec):
    with pytest.raises(VerifierError, match="two parts have the name 'number'"):
        await graded(spec({"name": "number"}, {"name": "number"}), "4")


def test_counts_are_sums(spec):
    grader = open_grading_pool(spec({"name": "number"}, {"name": "exact"}))
    assert isinstance(grader, CombinedGrader)
    assert grader.counts.graded == 0


def test_digest_stays_with_the_fields_of_a_later_release(spec):
    """An upgrade must not begin another segment of the curve of a run."""

    class Later(WeightedVerifier):
        more: int = 0

    section = spec({"python": {"function": "format"}})
    later = [Later.model_validate(one.model_dump(by_alias=True)) for one in section.verifiers]
    assert grading_digest(section.model_copy(update={"verifiers": later})) == grading_digest(section)


def test_digest_of_what_scores(spec, tmp_path):
    one = {"python": {"function": "format"}}
    assert grading_digest(spec(one)) == grading_digest(spec(one | {"timeoutSeconds": 9, "workers": 2}))
    others = [spec(one | {"weight": 2}), spec(one, combine="Product"), spec(one, {"name": "number"})]
    others += [spec({"python": {"function": "length"}}), spec(one | {"range": [0, 2]})]
    digests = [grading_digest(other) for other in (spec(one), *others)]
    (tmp_path / "rewards.py").write_text(REWARDS + "\n")
    digests.append(grading_digest(spec(one)))
    assert len(set(digests)) == 7
