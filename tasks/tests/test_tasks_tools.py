"""The environment ``tools``: calls in the text of replies, what tools return, and the answers that the task's verifier scores."""

from __future__ import annotations

import ast
import json
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalerl_api.spec import RunSpec
from scalerl_tasks import Graded, Prompt, VerifierError, task_problems
from scalerl_tasks.environments.calculator import MAX_BITS, calculate
from scalerl_tasks.environments.passages import MAX_WORDS, Passages
from scalerl_tasks.environments.protocol import MAX_MESSAGE_BYTES
from scalerl_tasks.environments.tool_calls import Call, Malformed, ToolsConfig
from scalerl_tasks.environments.tool_environment import Tools
from scalerl_tasks.open_graders import grading_digest, open_episodes, open_grading_pool

SUM = Prompt("sum", "2 + 2", "4")
TOOLS: list[Any] = ["calculator", "python", {"search": {"path": "passages.jsonl", "results": 2}}]
PATH = Path(__file__).with_name("passages_of_tests.jsonl")
PASSAGES = [
    {"text": "The cat sat on the mat."},
    {"title": "Dogs", "text": "A dog ran after the cat."},
    {"text": "Fish swim, and fish eat. Fish."},
]


def hermes(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run_of(folder: Path, **task: Any) -> RunSpec:
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 2", "answer": f"{n + 2}"}) + "\n" for n in range(20))
    )
    (folder / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    own: dict[str, Any] = {"name": "tools", "parameters": {"tools": TOOLS}}
    task = {"verifier": {"name": "number"}, "environment": own} | task
    spec = {
        "model": {"scratch": {}},
        "task": {"jsonl": {"path": "data.jsonl"}, "heldOut": {"size": 4}, **task},
        "budget": {"maxSteps": 1},
    }
    return RunSpec.model_validate(spec)


async def steps(folder: Path, episodes: list[list[str]], **task: Any) -> list[Graded]:
    section = run_of(folder, **task).task.tasks[0].section
    async with open_grading_pool(section, directory=folder) as pool:
        grader = open_episodes(section, pool)
        assert grader is not None
        return await grader.steps(SUM, episodes)


def said(step: Graded) -> list[str]:
    assert all(message.role == "tool" for message in step.messages)
    return [message.content for message in step.messages]


# --- episodes -------------------------------------------------------------------------------------


async def test_calls_are_answered_and_the_answer_is_scored(tmp_path: Path) -> None:
    call = hermes("calculator", expression="2 + 2")
    found = await steps(
        tmp_path,
        [[call], [call, "It is 4."], [call, "It is 5."], [call, "<tool_call>{", "4"], ["4"], [f"Ah.{call}"]],
    )
    assert [said(step) for step in found] == [["4"], [], [], [], [], ["4"]]
    assert [step.score for step in found] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    counts = [(v.parts["calls"], v.parts["malformed"]) for step in found if (v := step.verdict)]
    assert counts == [(1, 0), (1, 0), (1, 0), (1, 1), (0, 0), (1, 0)]


async def test_each_tool_and_each_failure(tmp_path: Path) -> None:
    """A failure is a message, not an error: the model reads it, and the episode goes on."""
    expected = {
        hermes("calculator", expression="9**9**9"): f"error: a number has more than {MAX_BITS:,} bits",
        hermes("python", code="x = 1\nx + 1"): "2",
        hermes("python", code="'<|im_end|>' + chr(0)"): "<|im_end|>\x00",
        hermes("python", code="print(3)\nNone"): "3",
        hermes("python", code="1 / 0"): "ZeroDivisionError: division by zero",
        hermes("python", code="x = ("): "SyntaxError: '(' was never closed (call.py, line 1)",
        hermes("python", code="pass"): "(the program printed nothing)",
        hermes("python", code="import sys\nsys.exit(3)"): "error: the program exited with status 3 (it has",
        hermes("python", code="while True: pass"): "error: the program ",
        hermes("python", code="open('/etc/passwd')"): "PermissionError",
        hermes("python", code="import socket\nsocket.socket()"): "PermissionError",
        hermes("python", code="'a' * (1 << 31)"): "MemoryError",
        hermes("python", code="\ud800"): "UnicodeEncodeError",
        hermes("search", query="Dog, dog!"): "Dogs\nA dog ran after the cat.",
        hermes("search", query="CAT"): "The cat sat on the mat.\n\nDogs\nA dog ran after the cat.",
        hermes("search", query="horse"): "nothing found",
        hermes("serach", query="dog"): "error: there is no tool 'serach'; did you mean 'search'?",
        hermes("search", query=["dog"]): "error: query of search has to be a string",
        hermes("search", text="dog"): "error: search has the argument query, and got text",
        hermes("search", query="dog", n=1): "error: search has the argument query, and got n, query",
        hermes("search"): "error: search has the argument query, and got none",
        '<tool_call>{"name": "search", "arguments": "dog"}</tool_call>': 'error: a call is {"name": …, "arguments"',
        "<tool_call>[]</tool_call>": "error: a call is",
        "<tool_call>" + "[" * 100_000: "error: the call is not JSON: it is nested",
        "<tool_call>" + "9" * 5000: "error: the call is not JSON",
        f"<tool_call>{hermes('python', code='1')}</tool_call>": "error: the call is not JSON",
        hermes("python", code="1")[:-20]: "error: the call is not JSON: ",
    }
    tools = ["calculator", {"python": {"seconds": 1}}, TOOLS[2]]
    own = {"name": "tools", "parameters": {"tools": tools}, "turnTimeoutSeconds": 30, "memory": "512Mi"}
    found = await steps(tmp_path, [[reply] for reply in expected], environment=own)
    for (reply, text), step in zip(expected.items(), found, strict=True):
        assert step.error is None, reply
        (content,) = said(step)
        assert content.startswith(text), (reply, content)


async def test_long_output_is_cut_to_what_a_record_carries(tmp_path: Path) -> None:
    codes = ["print('ab' * 5_000_000)", "print('\U0001f600' * 100_000)", "print('\\0' * 10**6)"]
    own = {"name": "tools", "parameters": {"tools": ["python"], "output": 12_000}}
    found = await steps(tmp_path, [[hermes("python", code=code)] for code in codes], environment=own)
    for step in found:
        assert step.error is None
        (content,) = said(step)
        assert "characters left out" in content
        assert len(content) <= 12_000
        assert len(json.dumps(content)) < MAX_MESSAGE_BYTES
    assert said(found[0])[0].endswith("(it has 4 s of processor time and 1,024 MiB)")


async def test_calls_of_a_reply_are_limited(tmp_path: Path) -> None:
    (step,) = await steps(tmp_path, [[hermes("calculator", expression="1") * 1000]])
    assert said(step) == ["1"] * 8 + ["error: 992 further calls were not made; a reply may have 8 at most"]
    assert step.verdict is not None
    assert step.verdict.parts == {"calls": 8, "malformed": 992}


async def test_calls_of_a_reply_share_its_time(tmp_path: Path) -> None:
    own = {"name": "tools", "parameters": {"tools": ["python"]}, "turnTimeoutSeconds": 4}
    started = time.monotonic()
    (step,) = await steps(
        tmp_path, [[hermes("python", code="import time\ntime.sleep(600)") * 3]], environment=own
    )
    assert time.monotonic() - started < 300
    assert re.search(r" \(it has [\d.]+ s\)$", said(step)[0]), (
        "the wall-clock limit, not that of the processor"
    )
    assert [content.partition(" (")[0] for content in said(step)] == [
        "error: the program took too long",
        *["error: no time was left for this call"] * 2,
    ]


async def test_thoughts_have_no_calls(tmp_path: Path) -> None:
    call = hermes("calculator", expression="2 + 2")
    found = await steps(
        tmp_path, [[f"<think>{call}</think>4"], [f"<think>4</think>{call}"], [f"<think>{call}"]]
    )
    assert [said(step) for step in found] == [[], ["4"], []]
    assert [step.score for step in found] == [1.0, 0.0, 0.0]


async def test_a_replay_gives_the_same_messages(tmp_path: Path) -> None:
    """In another process, after other episodes."""
    replies = [
        hermes("python", code="import random\n(random.random(), hash('a'), sorted(globals()))"),
        hermes("search", query="the cat fish"),
        hermes("python", code="print(id(object) and {1, 'b', 'a'})"),
    ]
    episodes = [replies[: n + 1] for n in range(3)]
    first = await steps(tmp_path, episodes)
    second = await steps(tmp_path, [*episodes[::-1], *episodes])
    assert second == [*first[::-1], *first]


async def test_parts_of_the_verifier_are_kept(tmp_path: Path) -> None:
    several = [{"name": "number", "label": "sum"}, {"name": "exact"}]
    found = await steps(
        tmp_path,
        [["It is 4."], [hermes("calculator", expression="1")]],
        verifier=None,
        verifiers=several,
    )
    assert [step.verdict and step.verdict.parts for step in found] == [
        {"sum": 1.0, "exact": 0.0, "calls": 0.0, "malformed": 0.0},
        {"sum": 0.0, "exact": 0.0, "calls": 1.0, "malformed": 0.0},
    ]
    with pytest.raises(VerifierError, match="the parts of a verdict are calls, calls, malformed"):
        await steps(tmp_path, [], verifier=None, verifiers=[{"name": "number", "label": "calls"}])


# --- checks before a run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({}, "tools: give a list of 1 to 16 tools"),
        ({"tools": "calculator"}, "tools: give a list"),
        ({"tools": ["calculater"]}, "tools[0]: there is no tool 'calculater'; did you mean 'calculator'?"),
        ({"tools": ["python", "python"]}, "tools: two have the name 'python'"),
        ({"tools": [{"python": {}, "search": {}}]}, "tools[0]: write a tool"),
        ({"tools": [["python"]]}, "tools[0]: write a tool"),
        ({"tools": [{"python": 3}]}, "tools[0].python: give its options"),
        ({"tools": [{"python": {"seconds": "3"}}]}, "tools[0].python.seconds: no such option, or not of its"),
        ({"tools": [{"python": {"seconds": 0}}]}, "tools[0].python.seconds: 0 is no integer from 1 to 120"),
        ({"tools": [{"python": {"name": "a b"}}]}, "tools[0].python.name: 'a b' is no name"),
        ({"tools": ["search"]}, "tools[0].search.path: give the file"),
        (
            {"tools": ["python"], "format": "hermes"},
            "format: 'hermes' is none of Hermes, Llama3, Text; did you",
        ),
        ({"tools": ["python"], "calls": True}, "calls: True is no integer"),
        ({"tools": ["python"], "output": 0}, "output: 0 is no integer from 1 to 12,000"),
        ({"tools": ["python"], "seconds": 3}, "seconds: no such parameter"),
    ],
)
def test_wrong_parameters_are_refused(tmp_path: Path, parameters: dict[str, Any], says: str) -> None:
    spec = run_of(tmp_path, environment={"name": "tools", "parameters": parameters})
    found = [str(problem) for problem in task_problems(spec, tmp_path)]
    assert len(found) == 1, found
    assert found[0].startswith("task.environment.parameters: environment.parameters." + says), found


@pytest.mark.parametrize(
    "environment", [{"name": "retry"}, {"name": "tools", "parameters": {"tools": TOOLS}}]
)
def test_verifier_of_groups_is_refused(tmp_path: Path, environment: dict[str, Any]) -> None:
    """Its replies do not come together."""
    (tmp_path / "own.py").write_text("def score(prompt, completions):\n    return [1.0] * len(completions)\n")
    own = {"python": {"path": "own.py", "function": "score", "signature": "group"}}
    (problem,) = task_problems(run_of(tmp_path, environment=environment, verifier=own), tmp_path)
    assert problem.field == "task.environment.name"
    assert "use the signature score" in problem.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', "line 2: it has no text"),
        ('{"text": "a"}\nb\n', "line 2: Expecting value"),
        ("[" * 100_000, "line 1: "),
        ('{"text": 1}', "line 1: it has no text"),
        ("\n", "has no lines"),
        ("\udcff", "cannot be read: 'utf-8' codec"),
    ],
)
def test_wrong_passages_are_refused(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(VerifierError, match=r"tools: search\.path: .*" + says):
        Passages(str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    spec = run_of(tmp_path)
    assert task_problems(spec, tmp_path) == []
    (tmp_path / "passages.jsonl").unlink()
    (problem,) = task_problems(spec, tmp_path, answers=False)
    assert problem.field == "task.environment.parameters"
    assert "environment.parameters.tools[2].search.path" in str(problem)
    assert "cannot be read" in str(problem)


def test_the_digest_has_what_tools_read(tmp_path: Path) -> None:
    def digest(**environment: Any) -> str:
        own = {"name": "tools", "parameters": {"tools": TOOLS}} | environment
        return grading_digest(run_of(tmp_path, environment=own).task.tasks[0].section, tmp_path)

    first = digest()
    assert digest(memory="2Gi", workers=2, turnTimeoutSeconds=3) == first
    assert digest(parameters={"tools": TOOLS, "calls": 3}) != first
    section = run_of(tmp_path).task.tasks[0].section
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "passages.jsonl").read_bytes())
    assert (
        digest(parameters={"tools": [*TOOLS[:2], {"search": {"path": "moved.jsonl", "results": 2}}]}) == first
    )
    (tmp_path / "passages.jsonl").write_text('{"text": "another"}')
    assert grading_digest(section, tmp_path) != first


def test_a_sandbox_that_cannot_start_is_of_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalerl_tasks.sandbox.launcher.COMMAND", "")
    tools = Tools(tools=["python"])
    with pytest.raises(
        VerifierError, match=r"^environment\.parameters\.tools: the tool python: the sandbox cannot"
    ):
        tools.open()


# --- calls in replies -------------------------------------------------------------------------------

LLAMA3 = ToolsConfig.read(["calculator", "python"], "Llama3")
TEXT = ToolsConfig.read(["calculator", {"python": {"name": "py"}}], "Text")
HERMES = ToolsConfig.read(["calculator", "python"])


def call3(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def test_calls_of_llama3_are_json_replies() -> None:
    one = call3("python", code="{1}")
    assert LLAMA3.read_calls(one) == [Call(1, "{1}")]
    assert LLAMA3.read_calls(f"<think>{one}</think>\n<|python_tag|>{one}; {one}") == [Call(1, "{1}")] * 2
    assert LLAMA3.read_calls('{"type": "function", ' + one[1:]) == [Call(1, "{1}")]
    for answer in ("", "4", f"I call {one}", "{1, 2}", '{"answer": 4}', "<|python_tag", "{"):
        assert LLAMA3.read_calls(answer) == [], answer
    for cut in (one[:-3], "<|python_tag|>print(1)", f"{one} and {one}", '{"name": "python"}'):
        assert any(isinstance(found, Malformed) for found in LLAMA3.read_calls(cut)), cut


def test_calls_of_text_are_lines() -> None:
    found = TEXT.read_calls("I see.\ncalculator: 2 + 2\n py:for i in x:\n  print(i)\npyx: 3\ncalculator:")
    assert found == [Call(0, "2 + 2"), Call(1, "for i in x:\n  print(i)\npyx: 3"), Call(0, "")]
    assert TEXT.read_calls("<think>py: 1</think>my py: 1") == []


PIECES = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                "<|python_tag|>",
                "{",
                "}",
                "[",
                "]",
                '"',
            ),
            *(
                '"name"',
                ": ",
                ", ",
                '"arguments"',
                '"parameters"',
                '"python"',
                '"code"',
                "python:",
                "py: ",
                "\n",
            ),
            *(
                hermes("python", code="1"),
                call3("python", code="1"),
                "null",
                "1e999",
                "NaN",
                "\x00",
                "\ud800",
                "é",
            ),
            *("\\u", ";", "\\", "9" * 5000, "[" * 3000, '{"name":'),
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=400)
@given(st.sampled_from([HERMES, LLAMA3, TEXT]), st.one_of(PIECES, st.text()), PIECES)
def test_reading_calls_never_raises_and_ignores_thoughts(config: ToolsConfig, reply: str, other: str) -> None:
    calls = config.read_calls(reply)
    assert config.read_calls(reply) == calls
    assert all(len(call.problem) < 300 for call in calls if isinstance(call, Malformed))
    if "</think>" not in reply and "<think>" not in reply:
        assert config.read_calls(f"<think>{other}</think>{reply}") == calls
        if "</think>" not in other:
            assert config.read_calls(f"<think>{other}") == []


@given(st.text(), st.text())
def test_arguments_come_back_as_they_were(code: str, other: str) -> None:
    if "</tool_call>" not in json.dumps(code) and "think>" not in code:
        reply = f"Well. {hermes('python', code=code)} and\n{hermes('calculator', expression='1')}"
        assert HERMES.read_calls(reply) == [Call(1, code), Call(0, "1")]
        assert LLAMA3.read_calls(call3("python", code=code)) == [Call(1, code)]


@settings(max_examples=50)
@given(st.lists(PIECES, min_size=1, max_size=3))
def test_steps_never_raise_and_do_not_depend_on_history(replies: list[str]) -> None:
    tools = Tools(tools=["calculator", {"search": {"path": str(PATH)}}])
    step = tools.step(SUM, replies)
    assert tools.step(SUM, replies) == step
    assert tools.step(SUM, replies[-1:]).messages == step.messages


# --- calculator ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(
            ("1+2*3", "7"),
            ("(1+2)*3", "9"),
            ("-2**2", "-4"),
            ("2**-2", "0.25"),
            ("2^3^2", "512"),
            ("7//2", "3"),
        ),
        *(("-7 // 2", "-4"), ("-7 % 3", "2"), ("1/3", "0.333333333333"), (".5+1.", "1.5"), ("1e3", "1000")),
        *(
            ("6 ÷ 3 × 2 − 1", "3"),
            ("2**0.5", "1.41421356237"),
            ("(-8)**(1/3)", "not real"),
            ("1/0", "by zero"),
        ),
        *(("0**-1", "by zero"), ("5 % 0", "by zero"), ("1**(9**99)", "1"), ("0**(9**99)", "0")),
        *(
            ("(-1)**(9**99)", "-1"),
            ("9**9**9", "more than"),
            ("2**9999.5", "more than"),
            ("1e9999", "more than"),
        ),
        *(
            ("9" * 2001, "characters"),
            ("9" * 1998 + "*9", "8999"),
            ("", "missing"),
            ("1 +", "missing at the end"),
        ),
        *(("(1", "not closed"), ("1)", "cannot read ')' there"), ("1 2", "cannot read '2' there")),
        *(
            ("__import__('os')", "cannot read"),
            ("x", "cannot read 'x'"),
            ("(" * 900, "nested"),
            ("-" * 900, "nested"),
        ),
        *(
            ("2**" * 300 + "2", "nested"),
            ("1_0", "cannot read '_0'"),
            ("٣", "cannot read"),
            ("1e99999", "more than"),
        ),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    started = time.thread_time()
    try:
        found = calculate(expression)
    except ValueError as error:
        found = str(error)
        assert value in found
    else:
        assert found.startswith(value) if len(expression) > 1000 else found == value
    assert time.thread_time() - started < 1


NUMBERS = st.one_of(st.integers(0, 999).map(str), st.decimals("0", "99", places=2).map(str))
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        st.tuples(inner, st.sampled_from(["2", "3", "-1", "0"])).map("**".join),
    ),
    max_leaves=8,
)


class _Exact(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Call(ast.Name("Fraction", ast.Load()), [ast.Constant(str(node.value))], [])


@given(EXPRESSIONS)
@example("7 // 2 * 3 % 5")
def test_calculator_agrees_with_python(expression: str) -> None:
    tree = ast.fix_missing_locations(_Exact().visit(ast.parse(expression, mode="eval")))
    try:
        expected = eval(compile(tree, "expression", "eval"), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            calculate(expression)
        return
    found = calculate(expression)
    if expected.denominator == 1:
        assert found == str(expected)
    else:
        assert float(found) == pytest.approx(float(expected), rel=1e-11)


@given(st.text("0123456789+-*/%().e^ ", max_size=60))
def test_calculator_gives_a_value_or_a_reason(expression: str) -> None:
    try:
        found = calculate(expression)
    except ValueError as error:
        found = str(error)
    assert 0 < len(found) < 4000


# --- search -----------------------------------------------------------------------------------------


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl"
    texts = ["red fish", "red red red fish and many more words of no use here", "blue fish", "red"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    passages = Passages(str(file))
    assert sorted(passages.search("red", 9)) == sorted([texts[0], texts[1], texts[3]])
    assert passages.search("blue fish", 1) == ["blue fish"]
    assert passages.search("fish", 2) == ["red fish", "blue fish"], "equal weights: the order of the file"
    assert passages.search("", 3) == []


def test_search_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl"
    common = " ".join(f"c{n}" for n in range(MAX_WORDS))
    file.write_text(json.dumps({"text": common}) + "\n" + json.dumps({"text": f"{common} rare"}) + "\n")
    passages = Passages(str(file))
    assert passages.search(f"{common} rare unknown", 1) == [f"{common} rare"]
    made: list[str] = []

    class Postings(dict[str, Any]):
        def __getitem__(self, word: str) -> Any:
            made.append(word)
            return super().__getitem__(word)

    passages._postings = Postings(passages._postings)
    passages.search(f"{common} more rare", 2)
    used = made[-MAX_WORDS:]
    assert "rare" in used
    assert made[MAX_WORDS + 1 :] == used
    with pytest.raises(ValueError, match="took too long"):
        passages.search("rare", 1, time.monotonic() - 1)


@given(st.text(), st.integers(1, 4))
def test_search_takes_any_query(query: str, results: int) -> None:
    found = Passages(str(PATH)).search(query, results)
    assert len(found) <= results
