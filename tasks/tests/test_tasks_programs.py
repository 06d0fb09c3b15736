"""Tests of programs in the layouts of public data sets, and the verdict on a completion."""

from __future__ import annotations

import base64
import json
import pickle
import runpy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.load import load_run
from scalerl_api.source import EvaluationTaskSpec
from scalerl_tasks import (
    AnswersError,
    GradingPool,
    VerifierConfig,
    check_answers,
    open_dataset,
    open_source,
)
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.programs.suites import Calls, Code, Scripts, read_suite, same_output, same_value
from scalerl_tasks.programs.verifier import CodeConfig, CodeVerifier, program_of
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sandbox import confinement
from scalerl_tasks.sandbox.confinement import Limits

needs_kernel = pytest.mark.skipif(
    bool(confinement.missing_from_kernel()), reason="the kernel offers no Landlock or seccomp"
)
LIMITS = Limits(cpu_seconds=120)


def _compressed(cases: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


STACK = """class Empty(Exception): pass
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Empty("the stack is empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def first(n):
    if n < 0: raise ValueError("n is negative")
    yield from range(n)
def order(items): items.sort()
"""
STACK_TEST = """from solution import Stack, Empty, first, order
import pytest

@pytest.fixture
def full():
    return Stack([1, (2, 3)])

def test_items(full):
    assert len(full) == 2 and full.items == [1, (2, 3)] and full.pop() == (2, 3)

@pytest.mark.parametrize("n, wanted", [(0, []), (3, [0, 1, 2])])
def test_first(n, wanted):
    assert list(first(n)) == wanted

def test_errors():
    with pytest.raises(Empty, match="empty"):
        Stack().pop()
    with pytest.raises(ValueError):
        list(first(-1))

def test_in_place():
    items = [3, 1]
    order(items)
    assert items == [1, 3]

class TestStack:
    def setup_method(self):
        self.stack = Stack()
    def test_equal(self):
        assert isinstance(self.stack, Stack) and self.stack == Stack() and self.stack != Stack([1])
"""

ROWS: dict[str, tuple[dict[str, Any], type, str, str]] = {
    "DeepCoder, scripts": (
        {
            "problem": "q",
            "tests": json.dumps(
                [
                    {"type": "stdin_stdout", "input": "1\n", "output": "2\n", "fn_name": None},
                    {"type": "stdin_stdout", "input": "2\n", "output": "4.0\n", "fn_name": None},
                ]
            ),
            "solutions": ["```python\nprint(2 * int(input()))\n```"],
        },
        Scripts,
        "print(int(input()) + int(0))",
        "DeepCoder",
    ),
    "DeepCoder, calls": (
        {
            "problem": "q",
            "tests": json.dumps(
                [{"type": "function_call", "fn_name": "f", "input": [[1, 2]], "output": [[2, 1]]}]
            ),
            "solutions": ["def f(x):\n    return x[::-1]"],
        },
        Calls,
        "def f(x): return x",
        "DeepCoder",
    ),
    "APPS, scripts": (
        {
            "question": "q",
            "input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}),
            "solutions": json.dumps(["import sys\nprint(sum(map(int, sys.stdin.read().split())))"]),
        },
        Scripts,
        "print(3)",
        "APPS or TACO",
    ),
    "TACO, calls": (
        {
            "question": "q",
            "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}),
            "solutions": ["class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"],
        },
        Calls,
        "def add(a, b): return 3",
        "APPS or TACO",
    ),
    "LiveCodeBench, scripts": (
        {
            "question_content": "q",
            "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
            "private_test_cases": _compressed([{"input": "2", "output": "4", "testtype": "stdin"}]),
        },
        Scripts,
        "print(1)",
        "LiveCodeBench",
    ),
    "LiveCodeBench, calls": (
        {
            "question_content": "q",
            "public_test_cases": json.dumps(
                [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
            ),
            "private_test_cases": json.dumps([{"input": "[]\n3", "output": "[]", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "shift"}),
            "starter_code": "class Solution: ...",
        },
        Calls,
        "class Solution:\n    def shift(self, x, n): return [4, 5]",
        "LiveCodeBench",
    ),
    "MBPP": (
        {
            "text": "q",
            "code": "def f(x):\n    return {y * 2 for y in x}, len(x) / 3",
            "test_list": ["assert f([1, 2])[0] == set([2, 4])", "assert math.isclose(f([])[1], 0)"],
            "test_setup_code": "import math",
        },
        Code,
        "def f(x): return {2, 4}, 1",
        "MBPP",
    ),
    "HumanEval": (
        {
            "prompt": 'def twice(x: int) -> int:\n    """Doubles."""\n',
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6",
            "entry_point": "twice",
        },
        Code,
        "    return 4",
        "HumanEval",
    ),
    "KodCode": (
        {"question": "q", "solution": STACK, "test": STACK_TEST},
        Code,
        STACK.replace("sort()", "reverse"),
        "KodCode",
    ),
}
"""Layout: a row with a right solution, the kind of its tests, and a program that passes some of them at most."""


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with CodeVerifier(CodeConfig("Share", LIMITS, seconds=120)) as one:
        yield one


def _dataset(folder: Path, *rows: dict[str, Any]) -> EvaluationTaskSpec:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"files": [str(folder / "rows.jsonl")]}
    return EvaluationTaskSpec.model_validate({"dataset": dataset, "verifier": {"code": {"cpuSeconds": 60}}})


@needs_kernel
@pytest.mark.parametrize("layout", ROWS)
def test_layout_is_recognized_and_graded(verifier: CodeVerifier, tmp_path: Path, layout: str) -> None:
    row, kind, wrong, name = ROWS[layout]
    spec = _dataset(tmp_path, row)
    assert spec.dataset is not None
    source = open_dataset(spec.dataset, tmp_path)
    prompt = source[0]
    source.close()
    assert source.table.info.layout == name
    assert isinstance(read_suite(prompt), kind)
    assert prompt.solution is not None or "LiveCodeBench" in layout
    if prompt.solution:
        verifier.check(prompt)
        right = verifier.score(prompt, f"Here it is:\n```python\n{program_of(prompt.solution)}\n```")
        assert (right.score, right.parts) == (1, {"compiled": 1, "tests_passed": 1})
    assert verifier.score(prompt, wrong).score < 1


@needs_kernel
def test_share_and_all(verifier: CodeVerifier) -> None:
    prompt = Prompt("p", "", json.dumps([f"assert f({n}) == {n}" for n in range(4)]))
    program = "def f(x): return min(x, 2)"
    assert verifier.score(prompt, program).score == 0.75
    with CodeVerifier(CodeConfig("All", LIMITS, seconds=120)) as strict:
        verdict = strict.score(prompt, program)
    assert (verdict.score, verdict.parts["tests_passed"]) == (0, 0.75)
    broken = verifier.score(prompt, "def f(x: return x")
    assert (broken.score, broken.parts) == (0, {"compiled": 0, "tests_passed": 0})


@needs_kernel
def test_tests_use_real_modules_and_the_functions_of_the_program(verifier: CodeVerifier) -> None:
    """A program's function may have the name of a module; a program's object may not stand in for one."""
    named = Prompt("p", "", json.dumps(["assert copy(1) == 2", "assert gcd(4, 6) == 7"]))
    assert verifier.score(named, "def copy(x): return 2\ndef gcd(a, b): return 7").score == 1
    forged = Prompt("p", "", json.dumps(["assert math.isclose(f(1), 1)"]))
    fake = "class math:\n    isclose = staticmethod(lambda a, b: True)\n"
    assert verifier.score(forged, fake + "def f(x): return 5").score == 0
    assert verifier.score(forged, fake + "def f(x): return 1").score == 1


PLAIN = {
    "assert f(1) == 2": "2 2.0",
    "assert f(1, 'a', {(1, 2): {3}}) == (1, [2, None, -0.5])": "(1,[2,None,-.5])",
    " assert (f() == True), 'why'": "True 1",
    "assert f(10 ** 3) == 1": None,
    "assert f(1) == 2 == 2": None,
    "assert f(x=1) == 2": None,
    "assert f(*[1]) == 2": None,
    "assert f(...) == 2": None,
    "assert f(1) == {1, 2}": None,
    "assert f(1) == {'a': 1}": None,
    "assert f(1) == b''": None,
    "assert f(1) != 2": None,
    "assert f(1)": None,
    "assert max(1, 2) == 2": None,
    "assert f(1) == 2; g()": None,
    "assert f(1) ==": None,
}
"""A statement, and values of f that pass it if it is run as a call; None if it needs a process of tests."""


@needs_kernel
@pytest.mark.parametrize("statement", PLAIN)
def test_plain_asserts_are_calls(verifier: CodeVerifier, statement: str) -> None:
    prompt, values = Prompt("p", "", json.dumps([statement])), PLAIN[statement]
    suite = read_suite(prompt)
    assert isinstance(suite, Code if values is None else Calls)
    for value in (values or "").split():
        assert verifier.score(prompt, f"def f(*_): return {value}").score == 1
    for value in ("3", "[1, [2, None, -.5]]", "f", "{'t': 1}"):
        assert values is None or verifier.score(prompt, f"def f(*_): return {value}").score == 0


@needs_kernel
def test_plain_asserts_compare_numbers_as_python_does(verifier: CodeVerifier) -> None:
    prompt = Prompt(
        "p", "", json.dumps(["assert f(1) == 0.5", "assert f(2) == 1267650600228229401496703205377"])
    )
    for half in ("Fraction(1, 2)", "Decimal('0.5')", "complex(.5)", ".5"):
        program = f"from decimal import *; from fractions import *\ndef f(x): return {half} if x == 1 else 2 ** 100 + 1"
        assert verifier.score(prompt, program).score == 1
    assert verifier.score(prompt, "def f(x): return .5000001 if x == 1 else 2.0 ** 100").score == 0


def test_plain_asserts_of_two_functions_or_with_a_setup_are_code() -> None:
    two = Prompt("p", "", json.dumps(["assert f(1) == 2", "assert g(1) == 2"]))
    one = Prompt("p", "", json.dumps(["assert f(1) == 2"]), metadata={"test_setup_code": "f = abs"})
    assert isinstance(read_suite(two), Code)
    assert isinstance(read_suite(one), Code)


@needs_kernel
def test_modules_of_the_solution_are_not_the_programs(verifier: CodeVerifier) -> None:
    """Tests that rely on an import of the row's solution have the real module."""
    tests = json.dumps(["assert np.allclose(f(1), [1, 2])", "assert Counter(f(1)) == Counter([1, 2])"])
    solution = (
        "import numpy as np\nfrom collections import Counter, deque\nimport nowhere\ndef f(x): return [1, 2]"
    )
    prompt = Prompt("p", "", tests, solution)
    forged = (
        "class np: allclose = staticmethod(lambda *_: True)\nclass Counter:\n    def __init__(s, x): pass\n"
        "    def __eq__(s, o): return True\ndef f(x): return %s"
    )
    assert verifier.score(prompt, forged % "5").score == 0
    assert verifier.score(prompt, forged % "[1, 2]").score == 1
    without = Prompt("p", "", json.dumps(["assert np.allclose(f(1), [1, 2])"]))
    assert verifier.score(without, forged % "5").score == 0
    assert verifier.score(without, forged % "[1, 2]").score == 1


@needs_kernel
def test_input_may_be_larger_than_the_files_of_a_program(verifier: CodeVerifier) -> None:
    suite = {"inputs": ["x" * (17 << 20)], "outputs": [str(17 << 20)]}
    program = "import sys\ntext = sys.stdin.read()\n{}\nprint(len(text))"
    prompt = Prompt("p", "", json.dumps(suite))
    assert verifier.score(prompt, program.format("")).score == 1
    assert verifier.score(prompt, program.format("open('own', 'w').write(text)")).score == 0


@needs_kernel
def test_tests_of_a_group_are_read_once(verifier: CodeVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Prompt] = []

    def reading(prompt: Prompt) -> Any:
        read.append(prompt)
        return read_suite(prompt)

    monkeypatch.setattr("scalerl_tasks.programs.verifier.read_suite", reading)
    one, two = (Prompt("p", "", json.dumps([f"assert f(1) == {n}"])) for n in (1, 2))
    scores = [verifier.score(prompt, "def f(x): return x").score for prompt in (one, one, two, one)]
    assert scores == [1, 1, 0, 1]
    assert read == [one, two, one]


@needs_kernel
def test_slow_test_fails_alone(verifier: CodeVerifier) -> None:
    """With scripts, a test that exceeds its limits does not fail the others."""
    prompt = Prompt("p", "", json.dumps({"inputs": ["0", "1", "2"], "outputs": ["0", "1", "2"]}))
    program = "n = int(input())\nif n == 1: raise SystemExit(1)\nprint(n)"
    assert verifier.score(prompt, program).score == pytest.approx(2 / 3)


@needs_kernel
def test_self_check_lists_rows_whose_solution_fails(tmp_path: Path) -> None:
    good = ROWS["MBPP"][0]
    bad = good | {"text": "r", "code": "def f(x): return 0"}
    none = good | {"text": "s", "test_list": ["f(1) == 2"]}
    spec = _dataset(tmp_path, good, bad, none)
    assert spec.dataset is not None
    with pytest.raises(AnswersError) as refused:
        check_answers(open_dataset(spec.dataset, tmp_path), spec)
    text = "\n".join(refused.value.texts)
    assert "line 2" in text
    assert "its own solution passes 0 of 2 tests: test 1: TypeError" in text
    assert "line 3" in text
    assert "a list of texts that are no assert statements" in text
    assert "line 1," not in text


@needs_kernel
@pytest.mark.asyncio
async def test_pool_grades_programs_and_survives_them() -> None:
    config = VerifierConfig("code", code=CodeConfig("All", Limits(cpu_seconds=1), seconds=120))
    prompt = Prompt("p", "", json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]}))
    programs = [
        "print(2 * int(input()))",
        "while True: pass",
        "import os; os.kill(os.getppid(), 9)",
        "print(4)",
    ]
    async with GradingPool(config) as pool:
        assert pool.part_names == ("compiled", "tests_passed")
        graded = await pool.score_group(prompt, programs)
        assert [one.score for one in graded] == [1, 0, 0, 1]
        assert all(one.error is None for one in graded)  # a program that hangs is wrong; grading did not fail
        assert (pool.counts.timeouts, pool.counts.deaths) == (0, 0)
        for test in (
            "assert f(1) == 2",
            "assert isclose(f(1), 2)",
        ):  # read, and the imports of the solution, under the audit guard
            own = Prompt("p", "", json.dumps([f" {test}"]), "from math import isclose\ndef f(x): return 2\n")
            graded = await pool.score_group(
                own, ["def f(x): return 2", "def isclose(*_): return 1\ndef f(x): return 3"]
            )
            assert [(one.score, one.error) for one in graded] == [(1, None), (0, None)]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("42", "JSON of no known form"),
        ("[]", "a list without tests"),
        ('["f(1) == 2"]', "no assert statements"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        ('[{"input": "1"}]', "a list without tests"),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', "no func_name"),
        ("some text", "neither JSON nor Python with tests"),
    ],
)
def test_answers_without_tests_are_refused(answer: str, problem: str) -> None:
    with pytest.raises(VerifierError, match=f"prompt p: its answer .*{problem}"):
        read_suite(Prompt("p", "", answer))


def test_private_tests_are_no_code() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return print, ("BOOM",)

    text = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
    cases = json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}])
    with pytest.raises(VerifierError, match=r"private_test_cases that cannot be read: .*only a text is read"):
        read_suite(Prompt("p", "", cases, metadata={"private_test_cases": text}))


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("a\n```\nold\n```\nb\n```python\nnew\n\nline\n```\n", "new\n\nline"),
        ("<think>```\nno\n```</think>\n```py\nyes\n```", "yes"),
        ("<think>```\nno\n```", ""),
        ("```python\ncut off", ""),
        ("```\nfirst\n```\n```\ncut off", ""),
        ("", ""),
    ],
)
def test_program_is_the_last_block(completion: str, program: str) -> None:
    assert program_of(completion) == program


@pytest.mark.parametrize(
    ("wanted", "given", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 2", "1  2 ", True),
        ("1\n2", "1 2", False),
        ("0.5", "0.5000001", True),
        ("0.5", "0.51", False),
        ("100000000000000000001", "100000000000000000002", False),
        ("1", "1.0", True),
        ("YES", "yes", False),
        ("", "\n", True),
        ("nan", "nan", True),
        ("1", "1e9999", False),
        ("1", "9" * 10_000, False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(wanted: str, given: str, same: bool) -> None:
    assert same_output(wanted, given) is same


@pytest.mark.parametrize(
    ("wanted", "given", "same"),
    [
        ([1, [2, 3]], (1, (2, 3)), True),
        ({"a": [1]}, {"a": (1,)}, True),
        ({"1": True}, {1: True}, True),
        (1, True, False),
        (0, False, False),
        (2, 2.0000001, False),
        (2.0, 2.0000001, True),
        ("1", 1, False),
        (None, None, True),
        ([1, 2], {1, 2}, False),
        (float("inf"), float("inf"), True),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_as_data(wanted: Any, given: Any, same: bool) -> None:
    assert same_value(wanted, given) is same


EXAMPLE = Path(__file__).parents[2] / "examples/tiny-code"


def test_example_data_are_those_of_its_script(tmp_path: Path) -> None:
    script = tmp_path / "make_data.py"
    script.write_text((EXAMPLE / "make_data.py").read_text())
    runpy.run_path(str(script))
    assert (tmp_path / "data.jsonl").read_text() == (EXAMPLE / "data.jsonl").read_text()


@needs_kernel
def test_example_can_be_graded() -> None:
    spec = load_run(EXAMPLE / "run.yaml").spec
    assert not spec.task.tasks[1:]
    section = spec.task.tasks[0].section
    check_answers(open_source(section, EXAMPLE), section, 32)
