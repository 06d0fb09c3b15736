"""Verdicts of the verifiers ``exact``, ``number`` and ``math-verify`` on pairs of reference and reply, kind by kind."""

import asyncio
import json
import random
import re
import string
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_tasks import GradingPool, Prompt, VerifierConfig, VerifierError, open_verifier
from scalerl_tasks.answers.expression_reader import read_expression
from scalerl_tasks.answers.extraction import extract
from scalerl_tasks.answers.normalization import normalize
from scalerl_tasks.answers.quantity import read_quantity
from scalerl_tasks.answers.tokens import UnreadableError
from scalerl_tasks.answers.units import canonical_unit
from scalerl_tasks.grading import audit_guard

FOLDER = Path(__file__).with_name("verdicts")
VERIFIERS = {name: open_verifier(VerifierConfig(name)) for name in ("exact", "number", "math-verify")}
audit_guard.install()


def pairs_of(name):
    """Rows of a file of verdicts: kind, reference, reply, score."""
    kind, rows = "", []
    for line in (FOLDER / f"{name}.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            kind = line.strip("# ")
        elif line:
            score, reference, reply = line.split(" ¦ ")
            rows.append((kind, reference, reply, int(score)))
    return rows


def grade(name, reference, reply):
    """The score as in a grader: with the audit hook, and no error."""
    prompt = Prompt("1", "q", reference)
    with audit_guard.guarded(prompt):
        return VERIFIERS[name].score(prompt, reply)


PAIRS = json.loads((FOLDER / "pairs.json").read_text("utf-8"))["pairs"]


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{p['reference']} ¦ {p['reply']}" for p in PAIRS])
def test_pair(pair):
    assert grade(pair["verifier"], pair["reference"], pair["reply"]) == pair["score"]


@pytest.mark.parametrize("name", VERIFIERS)
def test_verdicts_by_kind(name):
    rows = pairs_of(name)
    assert {score for *_, score in rows} == {0, 1}
    wrong = [row for row in rows if grade(name, *row[1:3]) != row[3]]
    assert wrong == []


@pytest.mark.parametrize("name", VERIFIERS)
def test_check_accepts_references_that_score(name):
    """A reference of which any reply scores 1 passes ``check``, and one that ``check`` refuses has no such reply."""
    for kind, reference, reply, score in pairs_of(name):
        if score == 1:
            VERIFIERS[name].check(Prompt("1", "q", reference))
            assert kind, reply


def test_math_verify_is_at_least_as_good_as_plain_math_verify():
    """The library's own parse and verify, as it is by default, on every eighth pair; benchmarks/verdicts.py runs all."""
    from math_verify import parse, verify

    better = 0
    for _, reference, reply, score in pairs_of("math-verify")[::8]:
        plain = int(verify(parse(f"${reference}$"), parse(reply)))
        own = grade("math-verify", reference, reply)
        assert plain != score or own == score, (reference, reply)
        better += own == score != plain
    assert better > 10


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("exact", r"\boxed{5}", "'5' is compared; write it as '5'"),
        ("exact", "<answer>5</answer>", "write it as '5'"),
        ("exact", "16 - 3 = 13 eggs.\nShe has 13.\n#### 13", "result after ####.*'13'"),
        ("exact", "<think>5</think>", "no reply can score"),
        ("exact", r"\boxed{5", "no reply can score"),
        ("exact", " ", "no answer"),
        ("number", "four", "has no number"),
        ("number", "10:30", "is not one number"),
        ("number", "(1,2)", "is not one number"),
        ("number", "x^2+3", "is not one number"),
        ("number", "1 or 2", "is not one number"),
        ("number", r"\sqrt{2}", "is not one number"),
        ("number", "", "has no number"),
        ("math-verify", " ", "cannot read"),
        ("math-verify", r"\frac{1}{", "cannot be met"),
        ("math-verify", r"\boxed{5", "cannot read"),
        ("math-verify", "$$", "cannot read"),
        ("math-verify", "?!", "cannot be met"),
        (
            "math-verify",
            "First he sells three of the eggs and then all of the others, so that none are left in the end.",
            "met",
        ),
        ("math-verify", "x + " * 2000 + "1", "cannot be met"),
    ],
)
def test_check_refuses_reference_that_cannot_be_met(name, answer, says):
    with pytest.raises(VerifierError, match=rf"(?s)prompt p-1.*{says}"):
        VERIFIERS[name].check(Prompt("p-1", "q", answer))


@pytest.mark.parametrize(
    ("name", "answer", "reply"),
    [
        ("number", "He has 16 - 3 = 13.\n#### 13", r"\boxed{13}"),
        ("math-verify", "He has 16 - 3 = 13.\n#### 13", r"\boxed{13}"),
        ("number", r"\boxed{13}", "13"),
        ("math-verify", r"\boxed{\frac12}", r"\boxed{0.5}"),
        ("number", "$13", r"\boxed{13}"),
    ],
)
def test_check_accepts_common_forms_of_references(name, answer, reply):
    VERIFIERS[name].check(Prompt("1", "q", answer))
    assert grade(name, answer, reply) == 1


@pytest.mark.parametrize(
    "answer", [r"9^{9^{9^{9}}}", r"\sum_{k=1}^{10^{12}} k!", "(" * 900 + "1" + ")" * 900, r"99999999!"]
)
def test_check_takes_bounded_time(answer):
    """Nothing of a reference is evaluated when it is checked, outside of the graders' limits."""
    begin = time.monotonic()
    for name in VERIFIERS:
        try:
            VERIFIERS[name].check(Prompt("1", "q", answer))
        except VerifierError:
            continue
    assert time.monotonic() - begin < 120


INJECTIONS = [
    "__import__('os').system('touch PWNED')",
    r"\text{__import__('os').system('touch PWNED')}",
    r"\operatorname{__import__('os').system('touch PWNED')}(1)",
    r"x_{__import__('os').system('touch PWNED')}",
    r"\sum_{k=1}^{3} \text{open('PWNED','w')}",
    r"\begin{pmatrix} exec(" r"'open(1)') \end{pmatrix}",
    r"\lambda x: eval('1')",
    r"f(__class__.__bases__)",
    r"\frac{eval('1')}{1}",
    r"Integer(1).__class__",
    r"|open('PWNED','w')|",
    r"\int_0^1 exec('1') dx",
    r"\vec{__import__('os')}",
    r"\mathcal{eval('1')} + 1",
    r"\sum_{n=1}^{\infty} \frac{x_{__import__('os').getpid()}}{n^2}",
]


async def test_injections_are_scored_zero(tmp_path, monkeypatch):
    """No text becomes code, in the references' expressions either; each reply has a verdict."""
    monkeypatch.chdir(tmp_path)
    replies = [form % text for text in INJECTIONS for form in ("\\boxed{%s}", "$%s$", "%s")]
    async with GradingPool(VerifierConfig("math-verify")) as pool:
        for reference in ("7", "|x-1|"):
            graded = await pool.score_group(Prompt("1", "q", reference), replies)
            assert [(one.score, one.error) for one in graded] == [(0, None)] * len(replies)
    assert list(tmp_path.iterdir()) == []


async def test_form_does_not_decide_whether_a_reply_is_graded():
    """Each of these makes sympy compile code of its own when it is compared."""
    forms = {
        "|x-1|": (r"|1-x|", r"|x-2|"),
        r"\frac{\pi^2}{6}": (r"\sum_{n=1}^\infty \frac{1}{n^2}", r"\sum_{n=1}^\infty \frac{1}{n^3}"),
        r"\sum_{k=1}^{n} \frac1k": (r"\sum_{j=1}^{n} \frac1j", r"\ln n"),
        r"\frac{\sqrt{\pi}}{2}": (r"\int_0^\infty e^{-x^2}dx", r"\int_0^\infty e^{-2x^2}dx"),
        r"e": (r"\lim_{n\to\infty}(1+\frac1n)^n", r"\sum_{n=0}^\infty \frac{2}{n!}"),
        r"\frac{x}{2}-\frac{\sin 2x}{4}": (r"\int \sin^2 x\,dx", r"\int \cos^2 x\,dx"),
        r"n!": (r"\prod_{k=1}^n k", r"\prod_{k=1}^n (k+1)"),
    }
    async with GradingPool(VerifierConfig("math-verify"), workers=2) as pool:
        groups = [
            pool.score_group(Prompt("1", "q", reference), [rf"\boxed{{{reply}}}" for reply in replies])
            for reference, replies in forms.items()
        ]
        graded = await asyncio.gather(*groups)
    assert [[(one.score, one.error) for one in group] for group in graded] == [[(1, None), (0, None)]] * len(
        forms
    )


LONG = [
    r"\boxed{" * 20_000,
    r"\boxed{1}, " * 100_000,
    r"\boxed{" + r"\frac{" * 300 + "1" + "}{2}" * 300 + "}",
    r"\boxed{" + "(" * 1000 + "1" + ")" * 1000 + "}",
    r"\boxed{" + "(1," * 400 + "1" + ")" * 400 + "}",
    r"\boxed{" + "1," * 1000 + "}",
    r"\boxed{" + r"\text{a}" * 250 + "}",
    r"\boxed{" + "9" * 2000 + "}",
    r"\boxed{" + r"1\pm 2, " * 200 + "1}",
    r"\boxed{" + "|" * 2000 + "}",
    "$" * 50_000,
    "$1 abc " * 100_000,
    "the answer is " * 100_000,
    "1 1/2 " * 100_000,
    "6 \\times " * 100_000,
    "1 cm^2 " * 100_000 + "x",
    "x" * 10_000_000,
    "7" * 10_000_000,
    "\\" * 1_000_000,
]


@pytest.mark.parametrize("name", ["number", "math-verify"])
def test_long_replies_take_linear_time(name):
    """All of it takes seconds; anything quadratic would run into the test's time limit."""
    for reply in LONG:
        assert grade(name, "5", reply) == 0, reply[:20]


@given(st.text(alphabet=string.printable + "½√π−€°٣", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_graded(text):
    for reply in (text, rf"\boxed{{{text}}}", f"<answer>{text}</answer>"):
        for name in VERIFIERS:
            assert grade(name, r"\frac{17}{1900}", reply) in (0, 1)


def test_equality_is_reflexive_and_needs_the_same_value():
    """Random rationals in random forms: equal forms score, others do not."""
    rng = random.Random(7)
    for _ in range(60):
        top, bottom = rng.randrange(-99, 99), rng.randrange(2, 60)
        k = rng.randrange(2, 9)
        forms = [
            rf"\frac{{{top}}}{{{bottom}}}",
            rf"\dfrac{{{top * k}}}{{{bottom * k}}}",
            f"{top}/{bottom}",
            rf"\frac{{{-top}}}{{{-bottom}}}",
            rf"\frac{{{top}}}{{{bottom}}} \text{{ cm}}",
        ]
        other = rf"\frac{{{top + rng.choice((-1, 1))}}}{{{bottom}}}"
        for name in ("number", "math-verify"):
            reference, reply = rng.sample(forms, 2)
            assert grade(name, reference, rf"\boxed{{{reply}}}") == 1, (reference, reply)
            assert grade(name, reference, rf"\boxed{{{other}}}") == 0, (reference, other)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"$\boxed{1}$ and $\boxed{2}$", ("1, 2", True)),
        (r"\boxed{1}, or \boxed{1}", ("1", True)),
        (r"\boxed{1}. Now \boxed{2}", ("2", True)),
        ("<answer>3</answer>", ("3", True)),
        ("so 3", ("so 3", False)),
    ],
)
def test_extract_joins_boxes_side_by_side(text, found):
    assert extract(text) == found


def test_normalize_is_idempotent_on_the_pairs():
    for _, reference, _, _ in pairs_of("math-verify"):
        once = normalize(reference)
        assert re.sub(r"\s", "", normalize(once)) == re.sub(r"\s", "", once)


@pytest.mark.parametrize(
    "text", ["2 3", "x +", r"\frac{1}", "(1", "1)", r"\unknown", "x''", "٣", "", r"\int x", "9" * 5000]
)
def test_read_expression_refuses(text):
    with pytest.raises(UnreadableError):
        read_expression(text)


@pytest.mark.parametrize(
    "text", ["", "x", "5 - 3", "1, 2", "10:30", r"\frac{1}{0}", "5 or 6", "5x", "4^2", "9" * 600]
)
def test_read_quantity_refuses(text):
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("centimetres", "cm"),
        ("cm2", "cm^2"),
        ("cubic feet", "ft^3"),
        ("km per hour", "km/h"),
        ("mph", "mi/h"),
        ("kg m/s^2", "kg*m/s^2"),
        ("N", "N"),
        ("apples", None),
        ("", None),
    ],
)
def test_canonical_unit(text, name):
    assert canonical_unit(text) == name


@pytest.mark.parametrize(
    "reply",
    [
        r"9^{9^{9^{9}}}",
        r"x^{99999999}",
        r"((((9!)!)!)!)!",
        r"9!!!!!!!!!!",
        r"\sum_{k=1}^{99999999999} \sin(k)",
        r"\sum_{k=1}^{1000000} k!",
        r"\sum_{k=1}^{x^{x}} k^{k^{k}}",
        r"\prod_{k=1}^{99999999} (k+x)",
        r"\log_{10^{10^{9}}} 5",
        r"\lfloor \pi^{99999} \rfloor",
        r"\lfloor e^{e^{e^{e}}}\rfloor",
        r"\tan(10^{10^{6}})",
        r"\sqrt{-" + "9" * 1500 + "}",
        "1e-999999999",
    ],
)
@pytest.mark.parametrize("reference", ["42", r"\frac{x^2}{1+x}", r"\sqrt{2}+\sqrt{3}"])
def test_numbers_too_large_to_compute_score_0_at_once(reference, reply):
    start = time.process_time()
    assert grade("math-verify", reference, rf"\boxed{{{reply}}}") == 0
    assert time.process_time() - start < 20


def test_boxes_without_braces_are_read_in_linear_time():
    start = time.process_time()
    for bare in (r"\boxed", r"\boxed1", r"\boxed 5\x"):
        extract(bare * 100_000)
    assert time.process_time() - start < 30
