"""The tests of a prompt: read from its answer and metadata, in the layouts of public data sets."""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from scalerl_tasks.errors import VerifierError
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sandbox.values import encode, refuse

_ASSERT = re.compile(r"\s*(assert\b|self\.assert)")
_MAX_UNPACKED_BYTES = 256 << 20
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Scripts:
    """Runs of a program: what it reads from standard input, and what it has to print."""

    cases: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one function: arguments, and the values it has to return."""

    function: str
    cases: Sequence[tuple[list[Any], list[Any]]]
    """The values of a case are alternatives."""
    exact: bool = False
    """Whether values are compared as Python does, not as data of JSON."""


@dataclass(frozen=True, slots=True)
class Code:
    """Tests that are code."""

    kind: str
    """``asserts``: a list of statements. ``check``: a function ``check`` of a candidate. ``pytest``: a file."""
    source: str | list[str]
    setup: Sequence[str] = ()
    entry: str = ""
    """Name of the candidate."""


Suite = Scripts | Calls | Code


def read_suite(prompt: Prompt) -> Suite:  # noqa: RET503 - _fail does not return
    """The tests of a prompt.

    Raises:
        VerifierError: its answer has none, or has them in no known form.
    """
    text = prompt.answer
    metadata = prompt.metadata
    try:
        data = _parsed(text)
    except ValueError:
        data = None
    if data is None:
        if entry := metadata.get("entry_point"):
            return Code("check", text, entry=str(entry))
        if re.search(r"^\s*(def test|class Test|assert\b)", text, re.MULTILINE):
            return Code("pytest", text)
        _fail(
            prompt,
            "is neither JSON nor Python with tests (def test…, or def check(candidate) with a column entry_point)",
        )
    if isinstance(data, list) and data and all(isinstance(one, str) for one in data):
        if not all(map(_ASSERT.match, data)):
            _fail(prompt, "is a list of texts that are no assert statements")
        data = [one.strip() for one in data]
        imports = metadata.get("test_imports") or []
        setup = [
            *([imports] if isinstance(imports, str) else imports),
            str(metadata.get("test_setup_code") or ""),
        ]
        setup = [one for one in setup if one.strip()]
        calls = None if setup else _calls_of(data)
        return calls or Code("asserts", data, [*_imports_of(prompt.solution, data), *setup])
    if isinstance(data, list):
        private = metadata.get("private_test_cases")
        return _of_cases(prompt, [*data, *(_private(prompt, private) if private else [])])
    if (
        isinstance(data, dict)
        and isinstance(data.get("inputs"), list)
        and isinstance(data.get("outputs"), list)
    ):
        if len(data["inputs"]) != len(data["outputs"]) or not data["inputs"]:
            _fail(prompt, f"has {len(data['inputs'])} inputs and {len(data['outputs'])} outputs")
        function = data.get("fn_name")
        pairs = list(zip(data["inputs"], data["outputs"], strict=True))
        return Calls(str(function), [_call(one, two) for one, two in pairs]) if function else _scripts(pairs)
    _fail(
        prompt,
        "is JSON of no known form: write {inputs, outputs, fn_name}, [{input, output}] or a list of assert statements",
    )


def _calls_of(statements: list[str]) -> Calls | None:
    """Statements ``assert f(1, 2) == 3`` as calls, which need no process of tests; None if one is of another form."""
    functions: set[str] = set()
    cases: list[tuple[list[Any], list[Any]]] = []
    for text in statements:
        try:
            (statement,) = ast.parse(text).body
            match statement:
                case ast.Assert(
                    ast.Compare(ast.Call(ast.Name(name), arguments, []), [ast.Eq()], [wanted])
                ) if name not in _BUILTINS:
                    functions.add(name)
                    value, values = ast.literal_eval(wanted), [ast.literal_eval(one) for one in arguments]
                    encode(values, refuse)
                    cases.append((values, [value]))
                case _:
                    return None
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        if not _is_sequence_or_scalar(value):
            return None
    return Calls(functions.pop(), cases, exact=True) if len(functions) == 1 else None


def _is_sequence_or_scalar(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_sequence_or_scalar, value))
    return value is None or isinstance(value, bool | int | float | str)


def _imports_of(solution: str | None, statements: list[str]) -> list[str]:
    """The imports of a solution that its tests rely on: a program is not to bring a module of its own."""
    try:
        body = ast.parse(solution or "").body
    except (SyntaxError, ValueError):
        return []
    used = set(re.findall(r"\w+", " ".join(statements)))
    found = (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    return [
        ast.unparse(node)
        for node in found
        if used & {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    ]


def _parsed(text: str) -> Any:
    data = json.loads(text)
    return json.loads(data) if isinstance(data, str) else data


def _of_cases(prompt: Prompt, cases: list[Any]) -> Suite:
    """Tests of DeepCoder and LiveCodeBench: ``{input, output}`` each, and what a function is called."""
    if not cases or not all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in cases):
        _fail(prompt, "is a list without tests {input, output}")
    first = cases[0]
    pairs = [(one["input"], one["output"]) for one in cases]
    function = first.get("fn_name")
    if first.get("testtype") == "functional":
        function = (
            function or _function_of(first.get("metadata")) or _function_of(prompt.metadata.get("metadata"))
        )
        if not function:
            _fail(prompt, "has functional tests, and no func_name in metadata")
        return Calls(str(function), [(_lines(one), [_value(two)]) for one, two in pairs])
    return Calls(str(function), [_call(one, two) for one, two in pairs]) if function else _scripts(pairs)


def _function_of(metadata: Any) -> Any:
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _private(prompt: Prompt, text: Any) -> list[Any]:
    """LiveCodeBench's further tests: JSON, also compressed, pickled as one text, and in base64."""
    try:
        cases = json.loads(text)
    except ValueError:
        try:
            unpacked = zlib.decompressobj().decompress(base64.b64decode(text), _MAX_UNPACKED_BYTES)
            cases = json.loads(_TextUnpickler(io.BytesIO(unpacked)).load())
        except Exception as error:
            _fail(prompt, f"has private_test_cases that cannot be read: {error}")
    return cases if isinstance(cases, list) else []


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}: only a text is read")


def _lines(text: Any) -> list[Any]:
    return [_value(line) for line in text.split("\n")] if isinstance(text, str) else list(text)


def _value(text: Any) -> Any:
    """JSON in a text; a text that is none is itself."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _call(given: Any, expected: Any) -> tuple[list[Any], list[Any]]:
    """APPS and TACO write a value as itself, or as the one item of a list; both are accepted."""
    arguments = given if isinstance(given, list) else _lines(given)
    wanted = _value(expected)
    return arguments, [wanted, wanted[0]] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]


def _scripts(pairs: Sequence[tuple[Any, Any]]) -> Scripts:
    return Scripts([(_joined(one), _joined(two)) for one, two in pairs])


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _fail(prompt: Prompt, problem: str) -> NoReturn:
    shown = prompt.answer if len(prompt.answer) <= 80 else prompt.answer[:80] + " …"
    raise VerifierError(f"prompt {prompt.id}: its answer {shown!r} {problem}")


# --- comparison ------------------------------------------------------------------------------------------

_RELATIVE = 1e-6


def same_output(wanted: str, given: str) -> bool:
    """Whether two outputs are equal: line by line, without blanks at their ends and blank lines at the end; numbers as values, to six
    digits where the wanted one has a point.

    >>> same_output("1 2\\n3.0\\n", "1 2 \\n3.0000001"), same_output("1\\n2", "1 2")
    (True, False)
    """
    ours, theirs = wanted.strip().split("\n"), given.strip().split("\n")
    if len(ours) != len(theirs):
        return False
    return all(
        one.strip() == two.strip() or _same_words(one.split(), two.split())
        for one, two in zip(ours, theirs, strict=True)
    )


def _same_words(wanted: list[str], given: list[str]) -> bool:
    return len(wanted) == len(given) and all(map(_same_word, wanted, given))


def _same_word(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    one, two = _number(wanted), _number(given)
    if one is None or two is None:
        return False
    return _near(one, two) if isinstance(one, float) else one == two


_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?")


@lru_cache(maxsize=4096)
def _number(word: str) -> int | float | None:
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _DECIMAL.fullmatch(word) else None


def same_value(wanted: Any, given: Any) -> bool:
    """Whether a function's value is the expected one: tuples are lists, keys of objects texts, and a wanted float is met to six digits.

    >>> same_value([1, [2.0]], (1, (2.0000001,))), same_value({"1": 2}, {1: 2}), same_value(1, True)
    (True, True, False)
    """
    if isinstance(wanted, list):
        same = isinstance(given, list | tuple) and len(given) == len(wanted)
        return same and all(map(same_value, wanted, given))
    if isinstance(wanted, dict):
        if not isinstance(given, dict):
            return False
        texts = {str(key): value for key, value in given.items()}
        return texts.keys() == wanted.keys() and all(
            same_value(value, texts[key]) for key, value in wanted.items()
        )
    if isinstance(wanted, bool) or isinstance(given, bool):
        return wanted is given
    if isinstance(wanted, int | float) and isinstance(given, int | float):
        return wanted == given or (isinstance(wanted, float) and _near(wanted, given))
    return type(wanted) is type(given) and bool(wanted == given)


def _near(wanted: float, given: float) -> bool:
    try:
        return abs(wanted - given) <= _RELATIVE * max(1.0, abs(wanted))
    except OverflowError:
        return False


def fenced_blocks(text: str) -> Iterator[str]:
    """The contents of Markdown's fenced blocks, in order; of an unclosed one, nothing."""
    lines: list[str] | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            if lines is None:
                lines = []
            else:
                yield "\n".join(lines)
                lines = None
        elif lines is not None:
            lines.append(line)
