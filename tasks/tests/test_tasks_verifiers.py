"""Scores of the verifiers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_tasks import (
    GymTask,
    Prompt,
    ReasoningGymSource,
    SourceError,
    VerifierConfig,
    VerifierError,
    extract_answer,
    open_verifier,
)
from scalerl_tasks.answers.number import equal, last_number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("  42 \n", "42"),
        ("<think>41?</think> 42", "42"),
        ("a</think>b</think> 42", "42"),
        ("<think>41, no", ""),
        ("</think>", ""),
        ("<answer>1</answer> or <answer> 42 </answer>!", "42"),
        ("<think><answer>1</answer></think><answer>42</answer>", "42"),
        ("<think><answer>41</answer></think>", ""),
        ("<answer>42", ""),
        ("<answer>41</answer> or <answer>42", ""),
        ("42</answer>", "42</answer>"),
        (r"so \boxed{41} no \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"\boxed{41} <answer>42</answer>", "42"),
        (r"\boxed{42", ""),
        (r"\boxed{41}, no, \boxed{42", ""),
        (r"\boxed{41}, no, \boxed{\frac{1}{2}", ""),
        (r"\boxed{ so \boxed{42}", "42"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{41 + \boxed{1}}", r"41 + \boxed{1}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\fbox{42}", "42"),
        (r"$\boxed 42$", "42"),
        (r"Write it in \boxed. \boxed{42}", "42"),
        (r"\boxed{}", ""),
        ("", ""),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


HUGE = [
    "x" * 10_000_000,
    "9" * 10_000_000,
    "<answer>" * 1_000_000,
    "</answer>" * 1_000_000,
    "\\boxed{" * 1_000_000,
    "\\boxed{" + "{" * 1_000_000 + "}" * 1_000_000,
    "\\boxed{" + "{}" * 1_000_000,
    "<think>" * 1_000_000 + "</think>" * 1_000_000,
    "1," * 5_000_000,
    "1,111" + ",111" * 2_000_000,
    "-" * 10_000_000 + "1",
    "1/" * 5_000_000,
    "1e" * 5_000_000,
    "1." * 5_000_000,
    "\0" * 10_000_000,
    "٣" * 5_000_000,
]


@pytest.mark.parametrize("completion", HUGE, ids=lambda text: repr(text[:12]))
@pytest.mark.parametrize("name", ["exact", "number"])
def test_extract_answer_is_linear(name, completion):
    """All of it takes seconds; anything quadratic would run into the test's time limit."""
    assert open_verifier(VerifierConfig(name)).score(Prompt("1", "q", "42"), completion) == 0.0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" Paris ", 1),
        ("paris", 0),
        ("<answer>Paris</answer>", 1),
        ("It is Paris", 0),
        ("", 0),
        ("P\0aris", 0),
    ],
)
def test_exact_verifier(completion, score):
    prompt = Prompt("1", "q", "Paris\n")
    assert open_verifier(VerifierConfig("exact")).score(prompt, completion) == score


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("42", "The answer is 42.", 1),
        ("42", "42.0", 1),
        ("42", "042", 1),
        ("42", "+42", 1),
        ("42", "-42", 0),
        ("-42", "x = -42", 1),
        ("-42", "−42", 1),
        ("3", "5-3", 1),
        ("3", "10 - 3", 1),
        ("-3", "(-3)", 1),
        ("42", "42 or 41", 0),
        ("42", "41 or 42", 1),
        ("1234567", "1,234,567", 1),
        ("1234567", "1,234,56", 0),
        ("5678", "1,234,5678", 1),
        ("1,234.50", "$1234.5", 1),
        ("0.1", ".1", 1),
        ("0.1", "0.10000000000000001", 0),
        ("0.3333333333333333", "1/3", 0),
        ("1/3", "2/6", 1),
        ("1/3", "2 / 6", 1),
        ("0.5", "1/2", 1),
        ("1/2", "1/0", 0),
        ("1500", "1.5e3", 1),
        ("1500", "15E+2", 1),
        ("0.015", "1.5e-2", 1),
        ("0", "-0.000", 1),
        ("0", "0e999999999", 1),
        ("1", "1e999999999999999999999", 0),
        ("1", "1e-999999999999999999999", 0),
        ("#### 18", "so 18", 1),
        ("50", "50%", 1),
        ("3", "٣", 0),
        ("3", "³", 0),
        ("3", "３", 0),
        ("1", "nan", 0),
        ("1", "inf", 0),
        ("1", "NaN1", 1),
        ("1", "__import__('os').getpid() or 1", 1),
        ("387420489", "9**9", 0),
        ("42", "4\x002", 0),
        ("42", "", 0),
        ("42", "no digits", 0),
        ("42", "9" * 600, 0),
        ("42", "<think>42</think>41", 0),
    ],
)
def test_number_verifier(answer, completion, score):
    assert open_verifier(VerifierConfig("number")).score(Prompt("1", "q", answer), completion) == score


@given(st.fractions(), st.fractions())
def test_equal_compares_as_rationals(a, b):
    def number(value):
        parsed = last_number(f"so {value.numerator}/{value.denominator}")
        assert parsed is not None
        return parsed

    assert equal(number(a), number(b)) == (a == b)
    assert equal(number(a), number(a))


@given(st.decimals(allow_nan=False, allow_infinity=False), st.decimals(allow_nan=False, allow_infinity=False))
def test_last_number_reads_decimals_exactly(a, b):
    left, right = last_number(f"= {a}"), last_number(f"= {b}")
    assert left is not None
    assert right is not None
    if max(abs(a.adjusted()), abs(b.adjusted())) < 1000:
        assert equal(left, right) == (Fraction(a) == Fraction(b))


@given(st.text())
def test_text_verifiers_accept_any_text(text):
    for name in ("exact", "number"):
        assert open_verifier(VerifierConfig(name)).score(Prompt("1", "q", "42"), text) in (0.0, 1.0)


MATH = [
    (r"\frac{1}{2}", r"\boxed{0.5}", 1),
    (r"\frac{1}{2}", "The answer is 1/2.", 1),
    (r"\frac{1}{2}", r"$\frac{2}{4}$", 1),
    (r"\frac{1}{2}", "0.25", 0),
    ("5", r"<think>4</think> $x = 5$", 1),
    ("5", "2x+5", 0),
    ("5", "so 2x+5", 0),
    ("5", "It is 5 apples", 1),
    ("1234", "1,234", 1),
    (r"x^2-1", r"\boxed{(x-1)(x+1)}", 1),
    (r"x^2-1", r"\boxed{(x-1)(x+2)}", 0),
    (r"\{1,2\}", r"$\{2,1\}$", 1),
    (r"(1,2]", r"\boxed{(1,2]}", 1),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
    (r"\text{Paris}", r"\boxed{\text{Paris}}", 1),
    ("2", "", 0),
    ("2", "nan", 0),
    ("2", r"\boxed{\infty}", 0),
    ("2", r"\boxed{\frac{1}{0}}", 0),
    ("3", "٣", 0),
    ("2", "__import__('os').getpid()", 0),
]


@pytest.fixture(scope="module")
def math_verify():
    return open_verifier(VerifierConfig("math-verify"))


@pytest.mark.parametrize(("answer", "completion", "score"), MATH)
def test_math_verify(math_verify, answer, completion, score):
    assert math_verify.score(Prompt("1", "q", answer), completion) == score


def test_reasoning_gym_verifier_uses_task_scorer():
    task = GymTask("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=1, size=10)
    verifier = open_verifier(VerifierConfig("reasoning-gym", task=task))
    prompt = ReasoningGymSource(task)[3]
    assert verifier.score(prompt, f"<think>hm</think><answer>{prompt.answer}</answer>") == 1.0
    assert verifier.score(prompt, "no idea") == 0.0
    assert verifier.score(prompt, "") == 0.0
    assert 0.0 < verifier.score(prompt, f"it is {prompt.answer}") < 1.0


def test_reasoning_gym_verifier_scores_by_metadata():
    task = GymTask("graph_color", {}, seed=1, size=5)
    source = ReasoningGymSource(task)
    verifier = open_verifier(VerifierConfig("reasoning-gym", task=task))
    prompt = source[0]
    assert prompt.answer == ""
    assert 0.0 <= verifier.score(prompt, "{}") < 1.0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (VerifierConfig("exakt"), "'exakt': no installed package has it.*did you mean 'exact'"),
        (VerifierConfig("exact", task=GymTask("chain_sum")), "takes a task"),
        (VerifierConfig("reasoning-gym"), "needs a reasoning-gym task"),
    ],
)
def test_open_verifier_refuses_bad_config(config, says):
    with pytest.raises(VerifierError, match=says):
        open_verifier(config)


def test_open_verifier_refuses_bad_task():
    with pytest.raises(SourceError, match="did you mean"):
        open_verifier(VerifierConfig("reasoning-gym", task=GymTask("chain_sun")))


@pytest.mark.parametrize(("name", "answer"), [("exact", " "), ("number", "four"), ("math-verify", " ")])
def test_check_refuses_ungradable_answer(name, answer):
    verifier = open_verifier(VerifierConfig(name))
    verifier.check(Prompt("p-1", "q", "4"))
    with pytest.raises(VerifierError, match="p-1"):
        verifier.check(Prompt("p-1", "q", answer))
