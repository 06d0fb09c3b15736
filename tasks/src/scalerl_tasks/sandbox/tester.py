"""The process of tests that are code. It is confined as a program is, and does not contain one: see :mod:`.remote`."""

from __future__ import annotations

import builtins
import importlib
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

from scalerl_tasks.sandbox.pytest_module import collect, pytest_module
from scalerl_tasks.sandbox.remote import Program

_BUILTINS = frozenset(dir(builtins))  # before the launcher adds names for programs
_PACKAGES = {"np": "numpy", "pd": "pandas"} | {
    name: name for name in ("numpy", "pandas", "scipy", "sympy", "torch")
}
"""By names that tests use without an import."""
_MAX_ERROR_CHARACTERS = 300


def run(channel: socket.socket, request: dict[str, Any]) -> None:
    """Run the tests of a request, and report each."""
    program = Program(channel)
    try:
        tests = list(_TESTS[request["tests"]](program, request))
    except BaseException as error:
        program.report({"count": 1})
        program.report({"passed": False, "why": _text(error)})
        return
    program.report({"count": len(tests)})
    for test in tests:
        try:
            test()
        except BaseException as error:
            program.report({"passed": False, "why": _text(error)})
        else:
            program.report({"passed": True})


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_ERROR_CHARACTERS]


def _asserts(program: Program, request: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Statements, each a test, as in MBPP."""
    names, codes = _prepare(program, request["source"], request["setup"])
    for code in codes:
        yield lambda code=code: exec(code, names)  # type: ignore[misc]  # noqa: S102


def _check(program: Program, request: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A function ``check`` of a candidate, as in HumanEval: one test."""
    names, (code,) = _prepare(program, [request["source"]])
    exec(code, names)  # noqa: S102
    entry = request["entry"]
    yield lambda: names["check"](_from_solution(program, entry))


def _pytest(program: Program, request: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A file of tests for pytest, as in KodCode: each function is a test, and each set of its parameters."""
    module = ModuleType("solution")
    module.__getattr__ = lambda name: _from_solution(program, name)  # type: ignore[method-assign]
    sys.modules |= {"solution": module, "pytest": pytest_module()}
    names, (code,) = _prepare(program, [request["source"]])
    try:
        exec(code, names)  # noqa: S102
    except ImportError as error:
        raise ImportError(
            f"{error}; tests may import from solution, pytest and the installed modules"
        ) from error
    tests = list(collect(names))
    if not tests:
        yield lambda: None  # the statements at the top level are the test
    yield from tests


def _from_solution(program: Program, name: str) -> Any:
    if name == "__all__":
        return program.ask({"names": True})["names"]
    if name.startswith("__"):
        raise AttributeError(name)
    found = program.get([name])
    if name not in found:
        raise AttributeError(f"the program does not define {name}")
    return found[name]


def _prepare(
    program: Program, texts: Sequence[str], setup: Sequence[str] = ()
) -> tuple[dict[str, Any], list[CodeType]]:
    """The globals of tests, and the code of each text.

    The globals are what the tests use and the program defines, except names of builtins. A module that is used without an import is the
    real one, not the program's.
    """
    module = ModuleType("tests")
    sys.modules["tests"] = module
    names = module.__dict__
    codes = [compile(text, "tests", "exec") for text in texts]
    used = set().union(*map(_names, codes)) - _BUILTINS
    for name in used & (sys.stdlib_module_names | _PACKAGES.keys()):
        if any(re.search(rf"\b{name}\.", text) for text in texts):
            names[name] = importlib.import_module(_PACKAGES.get(name, name))
    for text in setup:
        exec(compile(text, "setup", "exec"), names)  # noqa: S102
    names.update(program.get(sorted(used - names.keys())))
    return names, codes


def _names(code: CodeType) -> set[str]:
    """Global names that code uses, and names of attributes."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


_TESTS: dict[str, Callable[[Program, dict[str, Any]], Iterator[Callable[[], None]]]] = {
    "asserts": _asserts,
    "check": _check,
    "pytest": _pytest,
}
