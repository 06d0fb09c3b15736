"""The process verifier: corrupted solutions get the verdict they were made for, hostile ones never raise."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_extras.opgraph import CONTEXTS, OpGraphSource, OpGraphTask
from scalerl_extras.opgraph.parse import MAX_CHARACTERS, UNDEFINED, SolutionNode, compare, parse
from scalerl_extras.opgraph.solve import LETTERS, UNKNOWN, linear_text, solve
from scalerl_tasks import GradingPool, Prompt, VerifierConfig, VerifierError, open_verifier

NAMES = ("opgraph-outcome", "opgraph-blend", "opgraph-strict", "opgraph-verified")
OUTCOME, BLEND, STRICT, VERIFIED = (open_verifier(VerifierConfig(name)) for name in NAMES)
SOURCE = OpGraphSource(
    OpGraphTask(
        (2, 20), {"zoo": "0.4", "school": "0.3", "harbour": "0.2", "bakery": "0.1"}, ("forward", "reverse")
    )
)
RIGHT = dict.fromkeys(("wrong_values", "wrong_parents", "missing_steps", "extra_steps"), 0)


def with_step(solution, at, *steps):
    return replace(solution, steps=(*solution.steps[:at], *steps, *solution.steps[at + 1 :]))


def corrupt_value(rng, problem, solution):
    at = rng.choice([i for i, step in enumerate(solution.steps) if step.letter != UNKNOWN])
    step = solution.steps[at]
    slope, offset = step.value
    *before, last = step.equations
    last = last.removesuffix(linear_text(slope, offset)) + linear_text(slope, offset + 1)
    return with_step(solution, at, replace(step, equations=(*before, last))), {"wrong_values": 1}


def corrupt_parent(rng, problem, solution):
    """Another letter in the place of a parent's; None if no step has another one before it."""
    choices = [
        (at, other.letter)
        for at, step in enumerate(solution.steps)
        for other in solution.steps[:at]
        if step.parents and other.name not in step.parents
    ]
    if not choices:
        return None
    at, letter = rng.choice(choices)
    step = solution.steps[at]
    letters = {s.name: s.letter for s in solution.steps}
    old = letters[rng.choice(step.parents)]
    rank = next(i for i, e in enumerate(step.equations) if re.search(rf"\b{old}\b", e.split(" = ")[1]))
    left, first, *rest = step.equations[rank].split(" = ")
    changed = " = ".join([left, re.sub(rf"\b{old}\b", letter, first), *(rest or [first])])
    equations = (*step.equations[:rank], changed, *step.equations[rank + 1 :])
    return with_step(solution, at, replace(step, equations=equations)), {"wrong_parents": 1}


def corrupt_missing(rng, problem, solution):
    at = rng.choice([i for i, step in enumerate(solution.steps) if step.letter != UNKNOWN])
    children = sum(solution.steps[at].name in step.parents for step in solution.steps)
    return with_step(solution, at), {"missing_steps": 1, "wrong_parents": children}


def corrupt_extra(rng, problem, solution):
    words = CONTEXTS[problem.context]
    name = next(
        name
        for name in iter(lambda: words.instance(rng.randrange(64), rng.randrange(480)), None)
        if name not in problem.names
    )
    step = replace(solution.steps[0], name=name, letter="Z", equations=("Z = 4",), parents=(), value=(0, 4))
    at = rng.randrange(len(solution.steps))
    return with_step(solution, at, step, solution.steps[at]), {"extra_steps": 1}


def corrupt_answer(rng, problem, solution):
    return replace(solution, answer=solution.answer + rng.choice((-1, 1, 10))), {}


CORRUPTIONS = (corrupt_value, corrupt_parent, corrupt_missing, corrupt_extra, corrupt_answer)


def check_corruptions(count):
    """Each solution as it is, and corrupted in one way; returns how many verdicts were compared."""
    rng, compared = random.Random(5), 0
    for index in range(count):
        problem, prompt = SOURCE.problem(index), SOURCE[index]
        solution = solve(problem)
        nodes = len(solution.steps)
        wanted = {"outcome": 1, "process": 1} | RIGHT
        for verifier in (OUTCOME, BLEND, STRICT, VERIFIED):
            verdict = verifier.score(prompt, solution.text)
            assert (verdict.score, verdict.parts) == (1, wanted), solution.text
        for corrupt in CORRUPTIONS:
            found = corrupt(rng, problem, solution)
            if found is None:
                continue
            changed, parts = found
            right = corrupt is not corrupt_answer
            process = 1 - (sum(parts.values()) + (not right)) / nodes
            wanted = {"outcome": float(right), "process": pytest.approx(max(0, process))} | RIGHT | parts
            for verifier, score in ((OUTCOME, 1), (BLEND, 0.2 + 0.8 * max(0, process)), (STRICT, 0)):
                verdict = verifier.score(prompt, changed.text)
                assert verdict.parts == wanted, (corrupt, solution.text, changed.text)
                assert verdict.score == pytest.approx(score if right else 0), corrupt
            compared += 1
    return compared


def test_opgraph_corrupted_solutions_get_their_verdict():
    assert check_corruptions(150) > 600


@pytest.mark.full
def test_opgraph_ten_thousand_corrupted_solutions_get_their_verdict():
    assert check_corruptions(10_000) > 45_000


def test_opgraph_parse_finds_the_graph():
    """Of every solution: names, values and parents are those of the generator."""
    for index in range(200):
        solution = solve(SOURCE.problem(index))
        nodes = parse(solution.text)
        assert list(nodes) == [step.name for step in solution.steps]
        for step in solution.steps:
            value = (0, solution.answer) if step.letter == UNKNOWN else step.value
            assert nodes[step.name].value == value
            assert nodes[step.name].parents == set(step.parents)


FIRST = "Define A as a; so a = 3. "
AUTHORS = [
    # reply, outcome, process, as the authors' parser and reward grade it (gold: a = 3; b = a + 1 = 4)
    (f"{FIRST}Define B as b; so b = a + 1 = 3 + 1 = 4. </solution> <answer> 4. </answer>", 1, 1),
    (f"{FIRST}Define B as b; so b = a + 1 = 3 + 1 = 4. </solution> <answer> 4", 1, 1),
    (f"{FIRST}Define B as b; so b = a + 1 = 4. </solution> <answer> 4 </answer> <answer> 5 </answer>", 1, 1),
    (
        f"{FIRST}Define B as b; so b = a + 1 = 4. </solution> <answer> 5 </answer> <answer> 4 </answer>",
        0,
        0.5,
    ),
    (f"{FIRST}Define B as b; so b = a + 1 = 3 + 1 = 4. </solution> <Answer> 4 </Answer>", 1, 1),
    (f"{FIRST}Define B as b; so b = a + 1. </solution> <answer> 4 </answer>", 1, 1),
    (f"{FIRST}Define B as a; so a = a + 1 = 3 + 1 = 4. </solution> <answer> 4 </answer>", 1, 1),
    (f"{FIRST}Define B as a; so a = a + 1. </solution> <answer> 4 </answer>", 1, 1),
    (f"{FIRST}Define B as variable b; so b = a + 1 = 3 + 1 = 4. </solution> <answer> 4 </answer>", 1, 1),
    ("define A as a; so a = 3. define B as b; so b = a + 1 = 4. </solution> <answer> 4 </answer>", 1, 1),
    (f"{FIRST}Define B a b; so b = a + 1 = 3 + 1 = 4. </solution> <answer> 4 </answer>", 1, 1),
    (f"{FIRST}Define B as b; so b = 2 * a = 2 * 2 = 4. </solution> <answer> 4 </answer>", 1, 1),
    (f"{FIRST}Define B as b; so b = a + 1 = 9 + 9 = 4. </solution> <answer> 4 </answer>", 1, 1),
    ("4", 0, 0),
    (r"\boxed{4}", 0, 0),
    (f"{FIRST}Define B as b; so b = a + 1 = 3 + 1 = 5. </solution> <answer> 4 </answer>", 1, 0.5),
    (f"{FIRST}Define B as b; so b = 3 + 1 = 4. </solution> <answer> 4 </answer>", 1, 0.5),
    (f"{FIRST}</solution> <answer> 4 </answer>", 1, 0.5),
]


@pytest.mark.parametrize(("reply", "outcome", "process"), AUTHORS)
def test_opgraph_grades_as_the_authors(reply, outcome, process):
    gold = f"{FIRST}Define B as b; so b = a + 1 = 3 + 1 = 4. </solution> <answer> 4 </answer>"
    parts = BLEND.score(Prompt("1", "", "4", solution=gold), reply).parts
    assert (parts["outcome"], parts["process"]) == (outcome, process)


def test_opgraph_a_letter_of_an_intermediate_used_again():
    gold = parse("Define A as a; so a = 2. Define B as b; c = a + a = 4; so b = 2 * c = 8.")
    again = parse("Define A as a; so a = 2. Define B as b; b = a + a = 4; so b = 2 * b = 8.")
    assert again["B"] == gold["B"]
    nodes = parse(
        "Define A as a; so a = 2. Define B as b; c = a + 1 = 3; so b = c. Define C as c; so c = c + b = 6."
    )
    assert nodes["C"] == SolutionNode((0, 6), {"A", "B"})


def test_opgraph_verified_allows_other_right_steps():
    """Extra nodes, but no wrong or missing one, and no wrong answer."""
    prompt = SOURCE[3]
    other = "Define made up things as Z; so Z = 1. "
    scores = {v.name: v.score(prompt, other + prompt.solution).score for v in (OUTCOME, STRICT, VERIFIED)}
    assert scores == {"opgraph-outcome": 1, "opgraph-strict": 0, "opgraph-verified": 1}
    for index in range(60):
        problem, prompt, rng = SOURCE.problem(index), SOURCE[index], random.Random(index)
        for corrupt in CORRUPTIONS:
            if (found := corrupt(rng, problem, solve(problem))) is not None:
                assert VERIFIED.score(prompt, found[0].text).score == (corrupt is corrupt_extra)
    assert VERIFIED.score(prompt, f"<answer>{prompt.answer}</answer>").score == 0


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_opgraph_letters_do_not_matter(index, rng):
    prompt = SOURCE[index]
    letters = [letter for letter in LETTERS if letter not in "so"]
    renamed = dict(zip(LETTERS, [*rng.sample(letters, len(letters)), "s", "o"], strict=True))

    def rename(match):
        return (
            match[0]
            if match.start() and match.string[match.start() - 1].isalpha()
            else renamed.get(match[0], match[0])
        )

    text = re.sub(r"\b[A-Za-z]\b", rename, prompt.solution)
    verdict = STRICT.score(prompt, text)
    assert verdict.score == 1, text


def test_opgraph_blend_has_a_gate():
    """A wrong answer gets nothing, whatever its steps are; a right one by wrong steps a fifth."""
    prompt = SOURCE[3]
    steps, _ = prompt.solution.split("<answer>")
    assert BLEND.score(prompt, f"{steps}<answer> -1 </answer>").score == 0
    alone = BLEND.score(prompt, f"<answer> {prompt.answer} </answer>")
    assert (alone.score, alone.parts["process"]) == (0.2, 0)
    assert STRICT.score(prompt, f"<answer> {prompt.answer} </answer>").score == 0
    assert OUTCOME.score(prompt, f"<answer> {prompt.answer} </answer>").score == 1


def test_opgraph_extra_steps_are_capped():
    prompt = SOURCE[3]
    many = "".join(f"Define made up {i} as Z; so Z = 1. " for i in range(500))
    verdict = BLEND.score(prompt, many + prompt.solution)
    assert verdict.parts["extra_steps"] == 500
    assert (verdict.parts["process"], verdict.score) == (0, 0.2)


@pytest.mark.parametrize(
    ("text", "value", "parents"),
    [
        ("so b = a + 1 = 3.", (0, 3), {"A"}),
        ("so b = a + 1", (0, 3), {"A"}),  # not evaluated: the value follows
        ("c = a + 5; so b = 2 * c.", (0, 14), {"A"}),
        ("so b = q + 1.", None, {UNDEFINED}),
        ("so b = a + a = 9.", (0, 9), {"A"}),  # what it evaluates counts, right or wrong
        ("so b = 3.", (0, 3), set()),
        ("then we get b = 2a = 4", (0, 4), {"A"}),
        ("c = a + a = 4; d = c + 1 = 5; so b = 2 * d = 10.", (0, 10), {"A"}),
        ("so b = q + 1 = 3.", (0, 3), {UNDEFINED}),
        ("so b = a = -2.", (0, -2), {"A"}),
        ("so b = a = 3.5", None, {"A"}),
        ("c = 3 + 4 = 7; so b = a + c = 9.", (0, 9), {"A"}),
        ("so b = a = ²", None, {"A"}),
        ("so b = a = " + "9" * 5000, None, {"A"}),
        ("so b = 5; so b = a = 6", (0, 6), {"A"}),
        ("2 + b = 7; so b = a = 3", (0, 3), {"A"}),
    ],
)
def test_opgraph_parse_of_a_step(text, value, parents):
    nodes = parse(f"Define A as a; so a = 2. Define  B as b ; {text}")
    assert (nodes["B"].value, nodes["B"].parents) == (value, parents)


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("x", (1, 0)),
        ("2 * x + 4", (2, 4)),
        ("3 * (x + 2) - (x - 1)", (2, 7)),
        ("2x - 1", (2, -1)),
        ("-x + 1", (-1, 1)),
        ("x * x", None),
        ("x +", None),
        ("2 y", None),
        ("(" * 60 + "x", None),
        ("((x)", None),
        ("9999999 * 9999999 * 9999999 * x", None),
    ],
)
def test_opgraph_parse_of_linear_forms(form, value):
    nodes = parse(f"Define A as x; so x = x. Define B as b; so b = x + 0 = {form}. Solve 2 * x = 8, x = 4.")
    assert nodes["B"].value == value
    assert nodes["A"].value == (0, 4)


def test_opgraph_compare_without_steps_or_gold():
    gold = parse("Define A as a; so a = 2.")
    assert compare(gold, {}, wrong_answer=False).process == 0
    assert compare({}, gold, wrong_answer=False).process == 0
    assert compare(gold, gold, wrong_answer=False).process == 1
    assert parse("Define A as a; so a = 2. " + " " * MAX_CHARACTERS) == {}


def test_opgraph_thoughts_are_not_steps():
    prompt = SOURCE[0]
    assert STRICT.score(prompt, f"<think>Define Q as q; so q = 1.</think>{prompt.solution}").score == 1
    truncated = STRICT.score(prompt, f"<think>{prompt.solution}")
    assert (truncated.score, truncated.parts["process"]) == (0, 0)


def test_opgraph_verifier_grades_a_file_of_its_own():
    """A prompt of any source with such a solution."""
    text = "Define apples as k; so k = 3. </solution> <answer> 3 </answer>"
    STRICT.check(Prompt("1", "How many?", "3", solution=text))
    for solution in (None, "3", "Define apples as k; so k = many."):
        with pytest.raises(VerifierError, match="no solution that 'opgraph-strict' can compare"):
            STRICT.check(Prompt("1", "How many?", "3", solution=solution))


async def test_opgraph_verifier_in_the_grading_pool():
    prompt = SOURCE[1]
    async with GradingPool(VerifierConfig("opgraph-blend")) as pool:
        graded = await pool.score_group(prompt, [prompt.solution, "no", f"<answer>{prompt.answer}</answer>"])
    assert [g.score for g in graded] == [1, 0, 0.2]
    assert pool.part_names == BLEND.part_names
    assert graded[0].verdict.parts == {"outcome": 1, "process": 1} | RIGHT


# --- hostile text ----------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "Define ",
        " as ",
        "a",
        "x",
        "; so ",
        " = ",
        " + ",
        " * ",
        "(",
        ")",
        "-",
        "7",
        "9" * 30,
        ".",
        ",",
        "²",
        "\x00",
        "�",
        "</solution>",
        "<answer>",
        "</answer>",
        "</think>",
        "Solve ",
        "red kayaks by Gull Pier",
        "\n",
        "٣",
    ]
)


@given(
    st.integers(0, 500),
    st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=200),
    st.integers(0, 2000),
)
def test_opgraph_hostile_text_gets_a_verdict(index, text, at):
    prompt = SOURCE[index]
    for completion in (text, prompt.solution[:at] + text, prompt.solution[:at] + text + prompt.solution[at:]):
        for verifier in (OUTCOME, BLEND, STRICT, VERIFIED):
            verdict = verifier.score(prompt, completion)
            assert 0 <= verdict.score <= 1
            assert 0 <= verdict.parts["process"] <= 1


@pytest.mark.parametrize(
    "piece",
    [
        "Define ",
        "Define a as a;",
        "a = ",
        "b=c+d;c=b+e;",
        "=",
        "(",
        "a = (((x",
        " as ",
        "Define x as x; so x = x. y = x*",
        "Define n{} as a; b = b + c; c = a + b; ",
    ],
)
def test_opgraph_long_hostile_text_is_read_fast(piece):
    """Quadratic reading would run into the test's time limit."""
    many = "".join(piece.format(i) for i in range(10_000_000 // len(piece)))
    STRICT.score(SOURCE[0], many)
    STRICT.score(SOURCE[0], many[:MAX_CHARACTERS])
