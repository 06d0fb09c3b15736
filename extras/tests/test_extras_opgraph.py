"""Op-graph problems: exact difficulty, sound text, worked solutions, random access, no repeats."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from scalerl_api.spec import RunSpec, TaskSpec
from scalerl_extras.opgraph import CONTEXTS, MAX_OPERATIONS, MAX_PROBLEMS, OpGraphSource, OpGraphTask
from scalerl_extras.opgraph.contexts import KINDS, PLACES
from scalerl_extras.opgraph.graph import Form
from scalerl_extras.opgraph.names import permuted
from scalerl_extras.opgraph.source import COUNTS
from scalerl_tasks import (
    GradingPool,
    ParameterError,
    Prompt,
    VerifierConfig,
    open_grading_pool,
    open_source,
    open_verifier,
    split_held_out,
    task_problems,
    verifier_config,
)
from scalerl_tasks.sources import open_task
from scalerl_tasks.split import HeldOutGraphs

FOUR = {"zoo": "0.4", "school": "0.3", "harbour": "0.2", "bakery": "0.1"}
BOTH = ("forward", "reverse")


def source(low=2, high=10, **changes):
    return OpGraphSource(OpGraphTask((low, high), **({"contexts": FOUR, "modes": BOTH} | changes)))


# --- an independent reader of the text -------------------------------------------------------------------

_REFERENCE = re.compile(
    r"the (total number of \w+ (?:in|at|by|from) \w+ \w+|number of (?:\w+ ){2}(?:in|at|by|from) \w+ \w+)"
)


def place(name):
    return " ".join(name.split()[-3:])


def answer_of(text):
    """Solve a problem from its sentences alone, trying every value of an unknown."""
    body = text.removeprefix("<question> ").removesuffix(" </question> <solution>")
    *sentences, question = re.split(r"(?<=[.?]) (?=[A-Z])", body)
    (asked,) = _REFERENCE.findall(question)
    given, defined = {}, {}
    for sentence in sentences:
        if known := re.fullmatch(r"It is known that the (.+) is (\d+)\.", sentence):
            given[known[1]] = int(known[2])
            continue
        name, formula = re.fullmatch(r"The (number of .+?) (is .+|equals .+)\.", sentence).groups()
        assert name not in defined
        defined[name] = formula
    instances = set(defined) | {
        n for s in [*sentences, question] for n in _REFERENCE.findall(s) if not n.startswith("total")
    }

    def value(name, x):
        if name.startswith("total"):
            return sum(value(other, x) for other in instances if place(other) == place(name))
        if name not in defined:
            return x
        formula = defined[name]
        names = _REFERENCE.findall(formula)
        numbers = [value(other, x) for other in names]
        c = next(map(int, re.findall(r"\d+", formula)), None)
        if not names:
            return c
        if " more than " in formula:
            return numbers[0] + c
        if " less than " in formula:
            return numbers[0] - c
        if " minus " in formula:
            return numbers[0] - numbers[1]
        return (c or 1) * sum(numbers)

    if not given:
        return value(asked, None)
    ((top, total),) = given.items()
    found = [x for x in range(200) if value(top, x) == total]
    assert len(found) == 1, "a reverse problem has one solution"
    return found[0]


@pytest.mark.parametrize(("low", "high", "count"), [(2, 4, 400), (2, 20, 300), (21, MAX_OPERATIONS, 60)])
def test_opgraph_text_determines_the_answer(low, high, count):
    problems = source(low, high, distractors=4)
    for index in range(count):
        prompt = problems[index]
        assert answer_of(prompt.text) == int(prompt.answer), prompt.text


@pytest.mark.parametrize("operations", range(2, MAX_OPERATIONS + 1))
def test_opgraph_operations_are_exact(operations):
    problems = source(operations, operations)
    forms = Counter()
    for index in range(20):
        graph = problems.problem(index).graph
        assert graph.operations == operations
        assert problems[index].labels["operations"] == str(operations)
        needed = {graph.top}
        for at in range(graph.top, -1, -1):
            if at in needed:
                needed.update(graph.nodes[at].parents)
        assert needed == set(range(graph.top + 1)), "an operation that the answer does not need"
        assert all(parent < at for at, node in enumerate(graph.nodes) for parent in node.parents)
        assert all(node.value > 0 for node in graph.nodes)
        forms.update(node.form for node in graph.nodes)
    if operations >= 6:
        assert set(forms) == set(Form)


def operands(solution):
    """Operands of all steps of a worked solution, counted in its text: letters of parameters and constants."""
    count, between = 0, set()
    for step in solution.split(" </solution>")[0].split("Define ")[1:]:
        head, body = step.split("; ", 1)
        letter = head.split()[-1]
        for clause in re.split(r"; |\. ?", body):
            if clause.startswith("Solve") or "=" not in clause:
                continue
            target, first, *_ = clause.removeprefix("so ").split(" = ")
            between |= {target} - {letter}
            count += sum(one not in between for one in re.findall(r"[A-Za-z]|\d+", first))
    return count


@pytest.mark.parametrize("edges", range(2, MAX_OPERATIONS + 1))
def test_opgraph_edges_are_exact(edges):
    problems = source(edges, edges, count="Edges")
    forms = Counter()
    for index in range(20):
        prompt, graph = problems[index], problems.problem(index).graph
        assert graph.edges == edges == operands(prompt.solution), prompt.solution
        assert (prompt.labels["edges"], prompt.difficulty) == (str(edges), edges)
        assert prompt.labels["operations"] == str(graph.operations)
        assert answer_of(prompt.text) == int(prompt.answer), prompt.text
        assert all(node.value > 0 for node in graph.nodes)
        forms.update(node.form for node in graph.nodes)
    if edges >= 10:
        assert set(forms) == set(Form)


def test_opgraph_edges_convert_as_measured_on_the_authors_problems():
    """Problems of n operations, in the authors' count: 6.2, 9.4, 12.4, 15.4, 18.7 for 4, 6, 8, 10, 12."""
    for operations, edges in ((4, 6.2), (8, 12.4), (12, 18.7)):
        problems = OpGraphSource(OpGraphTask((operations, operations)))
        mean = sum(problems.problem(index).graph.edges for index in range(300)) / 300
        assert mean == pytest.approx(edges, abs=0.3)


def test_opgraph_count_is_part_of_the_digest():
    assert (
        OpGraphSource(OpGraphTask((2, 4), count="Edges")).digest != OpGraphSource(OpGraphTask((2, 4))).digest
    )


def test_opgraph_keys_of_graphs_ignore_names_and_distractors():
    """Equal keys exactly for equal definitions: of a thousand small problems, against their definitions written out."""

    def tree(graph, at):
        node = graph.nodes[at]
        if at == graph.unknown:
            return "x"
        parents = [tree(graph, parent) for parent in node.parents]
        if node.form in (Form.SUM, Form.TOTAL, Form.MULTIPLE):
            parents.sort()
        return f"{node.form.name}{node.constant}({','.join(parents)})"

    keys, trees = {}, {}
    for index in range(1000):
        graph = source(2, 5).problem(index).graph
        written = tree(graph, graph.top) + (
            "" if graph.unknown is None else f"={graph.nodes[graph.top].value}"
        )
        assert keys.setdefault(graph.key, written) == written
        assert trees.setdefault(written, graph.key) == graph.key
    assert len(keys) < 900


def test_opgraph_held_out_graphs_are_not_trained_on():
    """Of 2 to 4 operations: without the option most held-out graphs recur; with it none, and a share of each size is held out."""
    problems = OpGraphSource(OpGraphTask((2, 4), distractors=1))
    train, held_out = split_held_out(problems, 200, 3)
    trained = {train[index].graph for index in range(4000)}
    assert sum(held_out[index].graph in trained for index in range(200)) > 100
    graphs = HeldOutGraphs(Fraction("0.1"), 3)
    train, held_out = split_held_out(problems, 200, 3, graphs=graphs)
    trained = Counter(train[index].graph for index in range(4000))
    assert not any(held_out[index].graph in trained for index in range(200))
    assert all(held_out[index] in graphs for index in range(200))
    for part in (train, held_out):
        assert {part[index].labels["operations"] for index in range(200)} == {"2", "3", "4"}
    plain = split_held_out(problems, 200, 3)
    assert (train.digest, held_out.digest) != (plain[0].digest, plain[1].digest)
    # Of another task of a mix, they are excluded too.
    other, _ = split_held_out(OpGraphSource(OpGraphTask((2, 4), seed=9)), 50, 5, [held_out])
    assert not any(other[index] in graphs for index in range(1000))


def test_opgraph_held_out_graphs_of_a_spec():
    spec = {
        "plugin": {"name": "opgraph", "parameters": {"operations": [2, 3]}},
        "verifier": {"name": "opgraph-verified"},
    }
    task = open_task(TaskSpec(**spec, heldOut={"size": 20, "graphs": "0.2"}))
    assert {task.held_out[i].graph for i in range(20)}.isdisjoint(task.train[i].graph for i in range(500))
    with pytest.raises(ValueError, match=r"heldOut\.graphs needs a plugin"):
        TaskSpec(jsonl={"path": "a"}, verifier={"name": "exact"}, heldOut={"graphs": "0.2"})


@pytest.mark.parametrize("high", [4, 20, MAX_OPERATIONS])
@pytest.mark.parametrize("count", COUNTS)
def test_opgraph_solutions_are_true(high, count):
    """Every sign of equality holds, with letters, with numbers and with x."""
    problems = source(2, high, count=count)
    for index in range(60):
        prompt = problems[index]
        solution, tail = prompt.solution.split(" </solution> ")
        assert tail == f"<answer> {prompt.answer} </answer>"
        x = int(prompt.answer) if "Solve" in solution else None
        letters = {} if x is None else {"x": x}
        for chain in re.split(r"[;.,] ", solution + " "):
            chain = chain.removeprefix("so ").removeprefix("Solve ")
            if "=" not in chain or chain == "x = x":
                continue
            left, *rest = chain.split(" = ")
            if re.fullmatch("[a-zA-Z]", left) and left not in letters:
                letters[left] = eval(rest[-1], {"x": x})
            values = {eval(part, {}, letters) for part in [left, *rest]}
            assert len(values) == 1, chain
        steps = re.findall(r"Define (.+?) as (\w); ", solution)
        assert len({name for name, _ in steps}) == len({letter for _, letter in steps}) == len(steps)


def test_opgraph_number_can_be_read_from_the_names():
    """Why no two indices give the same problem: the names determine the index, whatever the order of the sentences."""
    for problems in (source(2, 3), source(2, 20, seed=5, distractors=0), source(30, MAX_OPERATIONS)):
        for index in range(300):
            problem = problems.problem(index)
            words, graph = CONTEXTS[problem.context], problem.graph
            places = {
                next(rank for rank, place in enumerate(words.places) if name.endswith(" " + place))
                for name in problem.names
            }
            kinds = {
                name: next((k for k, kind in enumerate(words.kinds) if name.startswith(kind)), None)
                for name in problem.names
            }
            top = problem.names[graph.top]
            top_place = next(rank for rank, place in enumerate(words.places) if top.endswith(" " + place))
            at_top = [
                kind
                for name, kind in kinds.items()
                if name.endswith(words.places[top_place]) and kind is not None
            ]
            kind = sum(at_top) % KINDS if kinds[top] is None else kinds[top]
            distance = sum(place - top_place for place in places) % PLACES - 1
            number = (distance * PLACES + top_place) * KINDS + kind
            assert number == permuted(index, problems.task.seed)
            assert all(name.removeprefix("total ") in " ".join(problem.sentences) for name in problem.names)


def test_opgraph_permutation_has_no_repeats():
    assert MAX_PROBLEMS == PLACES * (PLACES - 1) * KINDS
    numbers = {permuted(index, 3) for index in range(0, MAX_PROBLEMS, 97)}
    assert len(numbers) == len(range(0, MAX_PROBLEMS, 97))
    assert numbers <= set(range(MAX_PROBLEMS))


def test_opgraph_smallest_problems_do_not_repeat():
    problems = OpGraphSource(OpGraphTask((2, 2), distractors=0))
    seen = {frozenset(problems.problem(index).sentences) for index in range(10_000)}
    assert len(seen) == 10_000
    train, held_out = split_held_out(problems, 500, seed=1)
    texts = {held_out[i].text for i in range(500)}
    assert len(texts) == 500
    assert all(train[i].text not in texts for i in range(2000))


def test_opgraph_difficulty_needs_no_problem():
    source = OpGraphSource(OpGraphTask((2, 9)))
    train, held_out = split_held_out(source, 20, 3)
    for part in (source, train, held_out):
        for index in range(20):
            assert part.difficulty(index) == part[index].difficulty
        with pytest.raises(IndexError):
            part.difficulty(len(part))


def test_opgraph_random_access_is_deterministic():
    """The last index of a million, in another process with other hashes of strings."""
    code = (
        "from scalerl_extras.opgraph import *; s = OpGraphSource(OpGraphTask((2, 20), {'zoo': '0.9', 'school': '0.1'},"
        " ('forward', 'reverse'), seed=7, size=1_000_000)); print(repr(s[999_999]), s.digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_opgraph_problems_stay_the_same():
    """Curves are compared by digests: who changes a word or a draw also raises ``_VERSION`` of the source."""
    problems = source(2, 20, seed=11)
    content = "\n".join(f"{p.text}\n{p.solution}" for p in (problems[i * 4999] for i in range(200)))
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "8f87b96bf3d46aa5"


def test_opgraph_guide_shows_what_the_code_prints():
    guide = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    block = next(
        b
        for b in re.findall(r"^```yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
        if "name: opgraph\n" in b
    )
    prompt = open_source(TaskSpec.model_validate(yaml.safe_load(block)["task"]))[16]
    assert (prompt.labels["operations"], prompt.labels["mode"]) == ("4", "reverse")
    assert f"```text\n{prompt.text}\n```" in guide
    assert f"```text\n{prompt.solution}\n```" in guide


def test_opgraph_digest_depends_on_everything():
    digests = {
        source(**changes).digest
        for changes in (
            {},
            {"low": 3},
            {"contexts": {"zoo": "1"}},
            {"modes": ["reverse"]},
            {"seed": 1},
            {"size": 9},
            {"distractors": 0},
        )
    }
    assert len(digests) == 7


def test_opgraph_problems_do_not_depend_on_order_of_contexts():
    """An API server sorts the names of a mapping."""
    one = source(contexts={"zoo": "0.5", "school": "0.3", "bakery": "0.2"})
    other = source(contexts={"bakery": "0.2", "school": "0.3", "zoo": "0.5"})
    assert one.digest == other.digest
    assert [one[i].text for i in range(50)] == [other[i].text for i in range(50)]


def test_opgraph_draws_follow_the_weights():
    problems = source(2, 5)
    labels = [problems[i].labels for i in range(3000)]
    for key, shares in (
        ("context", {name: float(weight) for name, weight in FOUR.items()}),
        ("mode", {"forward": 0.5, "reverse": 0.5}),
        ("operations", {str(n): 0.25 for n in range(2, 6)}),
    ):
        counts = Counter(label[key] for label in labels)
        assert counts.keys() == shares.keys()
        for name, share in shares.items():
            assert abs(counts[name] / 3000 - share) < 0.04
    rare = OpGraphSource(OpGraphTask((2, 2), {"zoo": "0.99", "school": "0.01"}))
    assert 10 <= sum(rare[i].labels["context"] == "school" for i in range(3000)) <= 60


def test_opgraph_distractors_do_not_change_the_answer():
    problems = source(2, 8, distractors=6)
    extra = [problems.problem(i).graph for i in range(300)]
    assert {len(g.nodes) - g.top - 1 for g in extra} == set(range(7))


def test_opgraph_contexts_share_no_words():
    words = [
        {
            word
            for name in (*c.places, *c.kinds)
            for word in name.split()
            if word not in ("in", "at", "by", "from")
        }
        | {c.things}
        for c in CONTEXTS.values()
    ]
    assert sum(map(len, words)) == len(set.union(*words))
    assert len(CONTEXTS) >= 3


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        ({"low": 1}, "operations", "1 to 10: give the least first, and both from 2 to 50"),
        ({"low": 9, "high": 8}, "operations", "9 to 8: give the least first"),
        ({"high": 51}, "operations", "both from 2 to 50"),
        ({"contexts": {"zoos": "1"}}, "contexts", "no context 'zoos'; did you mean 'zoo'"),
        ({"contexts": {"zoo": "0.9"}}, "contexts", "sum to 0.9; they must sum to 1"),
        ({"contexts": {}}, "contexts", "sum to 0"),
        ({"contexts": {"zoo": "0.9999999999", "school": "1e-10"}}, "contexts", "more than nine digits"),
        ({"modes": []}, "modes", "give some of forward, reverse"),
        ({"modes": ["back"]}, "modes", "give some of forward, reverse"),
        ({"distractors": 11}, "distractors", "distractors are 11: give 0 to 10"),
        ({"size": 0}, "size", "take another seed"),
        ({"size": MAX_PROBLEMS + 1}, "size", "14,714,880 problems: take another seed"),
    ],
)
def test_opgraph_task_refuses(changes, parameter, message):
    with pytest.raises(ParameterError, match=re.escape(message)) as refused:
        source(**changes)
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("index", [-1, 100])
def test_opgraph_index_out_of_range(index):
    with pytest.raises(IndexError):
        source(size=100)[index]


async def test_open_task_of_op_graph_section():
    section_ = {
        "operations": [2, 4],
        "contexts": {"zoo": "0.5", "school": "0.5"},
        "modes": ["reverse"],
        "seed": 7,
    }
    spec = TaskSpec.model_validate(
        {
            "plugin": {"name": "opgraph", "parameters": section_ | {"size": 300}},
            "verifier": {"name": "opgraph-strict", "memory": "256Mi", "timeoutSeconds": 120},
            "heldOut": {"size": 20},
        }
    )
    task = open_task(spec)
    assert (len(task.train), len(task.held_out)) == (280, 20)
    prompt = task.train[5]
    assert {prompt.labels["mode"], task.held_out[0].labels["mode"]} == {"reverse"}
    assert {task.train[i].labels["context"] for i in range(40)} == {"zoo", "school"}
    verifier = open_verifier(verifier_config(spec))
    for index in range(20):
        verifier.check(task.train[index])
    async with open_grading_pool(spec) as pool:
        graded = await pool.score_group(prompt, [prompt.solution, f"<answer>{prompt.answer}</answer>"])
    assert [g.score for g in graded] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"operations": [8, 4]}, "give the least first"),
        ({"operations": [2, MAX_OPERATIONS + 1]}, "give the least first"),
        ({"operations": [4]}, r"parameters\.operations\.1: Field required"),
        ({"operations": [2, 4], "count": "Nodes"}, "give one of Operations, Edges"),
        ({"operations": [2, 4], "contexts": {"moon": "1"}}, "no context 'moon'"),
        ({"operations": [2, 4], "contexts": {"zoo": "0.9", "school": "0.01"}}, "must sum to 1"),
        ({"operations": [2, 4], "contexts": {"zoo": "1.5", "school": "-0.5"}}, "from 0 to 1"),
        ({"operations": [2, 4], "modes": ["back"]}, "give some of forward, reverse"),
        ({"operations": [2, 4], "sizes": 3}, r"parameters\.sizes: Unexpected keyword"),
        ({"operations": [2, 4], "size": 1000}, r"lower task\.heldOut\.size"),
    ],
)
def test_opgraph_parameters_that_are_refused(parameters, says):
    spec = {"plugin": {"name": "opgraph", "parameters": parameters}, "verifier": {"name": "opgraph-blend"}}
    run = {"model": {"scratch": {}}, "task": spec, "budget": {"maxSteps": 1}}
    (problem,) = task_problems(RunSpec.model_validate(run), answers=False)
    assert re.search(says, problem.text)
    assert problem.field.startswith(("task.plugin", "task.heldOut.size"))


async def test_opgraph_tells_which_completions_have_an_answer():
    async with GradingPool(VerifierConfig("opgraph-outcome")) as pool:
        found = await pool.score_group(Prompt("a", "2 + 2?", "4"), ["<answer>5", "5"])
    assert [(one.score, one.verdict.answered) for one in found] == [(0.0, True), (0.0, False)]
