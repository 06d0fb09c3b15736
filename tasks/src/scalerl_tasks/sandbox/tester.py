"""The process of tests that are code. It is confined as a program is, and does not contain one: the program's functions are stand-ins
that call it in its own process, through the caller.

So a program sees only the arguments of its calls. What it returns is plain data, or a reference: :class:`Remote`. No comparison
with plain data is left to the program, so an object whose ``__eq__`` is always true equals nothing here, one whose ``__contains__``
is always true contains what it iterates over, and a number of which the program was given a part is not read from it.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import itertools
import json
import math
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from scalerl_tasks.sandbox import channel as messages
from scalerl_tasks.sandbox.values import decode, encode, pack

CALL = b"C"
"""Kind of a message that is passed on to the program, whose answer is passed back."""
RESULT = b"R"
"""Kind of a message about the tests: their number, then the result of each."""
_BUILTINS = frozenset(dir(builtins))  # before the launcher adds names for programs
_PACKAGES = {"np": "numpy", "pd": "pandas"} | {
    name: name for name in ("numpy", "pandas", "scipy", "sympy", "torch")
}
"""By names that tests use without an import."""
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_CHARACTERS = 300


def run(channel: socket.socket, request: dict[str, Any]) -> None:
    """Run the tests of a request, and report each."""
    program = _Program(channel)
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


class _Program:
    """The program, through the caller."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._exceptions: dict[str, type[BaseException]] = {}

    def report(self, result: dict[str, Any]) -> None:
        messages.send(self._channel, RESULT + pack(result))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        messages.send(self._channel, CALL + pack(request))
        answer: dict[str, Any] = json.loads(messages.receive(self._channel, _MAX_ANSWER_BYTES))
        if "raised" in answer:
            error = self._exception(answer["raised"])(answer.get("text", ""))
            if isinstance(error, StopIteration) and request.get("helper") != "next":
                raise RuntimeError(
                    "the program raised StopIteration"
                )  # it would end a loop of the tests, which then pass
            raise error
        return answer

    def get(self, names: list[str]) -> dict[str, Any]:
        """Values of those names that the program defines."""
        values = self.ask({"get": names})["values"]
        return {name: decode(value, self._resolve) for name, value in values.items()}

    def call(self, request: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        request = request | {"arguments": [encode(one, self._refer) for one in arguments]}
        if named:
            request["named"] = {name: encode(one, self._refer) for name, one in named.items()}
        can_change = [at for at, one in enumerate(arguments) if isinstance(one, list | dict | set)]
        if can_change:
            request["mutated"] = True
        answer = self.ask(request)
        for at, data in answer.get("changed", {}).items():
            _assign(arguments[int(at)], decode(data, self._resolve))
        return decode(answer["value"], self._resolve)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"object": value._id, "of": value._kind}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": value.__name__, "of": ""}
        raise TypeError(f"a {type(value).__name__} cannot be passed to the program")

    def _resolve(self, data: dict[str, Any]) -> Any:
        return self._exception(data) if "exception" in data else Remote(self, data["object"], data["of"])

    def _exception(self, data: dict[str, Any]) -> type[BaseException]:
        name, base = data["exception"], getattr(builtins, data["of"], Exception)
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if name not in self._exceptions:
            self._exceptions[name] = type(name, (base,), {})
        return self._exceptions[name]


def _assign(target: Any, value: Any) -> None:
    if isinstance(target, list):
        target[:] = value
    else:
        target.clear()
        target.update(value)


class Remote:
    """An object of the program."""

    _id: int

    def __init__(self, program: _Program, number: int, kind: str) -> None:
        self.__dict__.update(_program=program, _id=number, _kind=kind, _given=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._program.call({"helper": "getattr"}, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.call({"helper": "setattr"}, self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.call({"object": self._program._refer(self)}, *arguments, **named)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and bool(
            self._program.call({"helper": "isinstance"}, instance, self)
        )

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Remote):
            return bool(self._program.call({"helper": "contains"}, self, item))
        return any(one is item or one == item for one in iter(self))

    def __eq__(self, other: object) -> Any:
        return self._compared("eq", other)

    def __ne__(self, other: object) -> Any:
        return self._compared("ne", other)

    def __hash__(self) -> int:
        return int(self._program.call({"helper": "hash"}, self))

    def _compared(self, helper: str, other: object) -> Any:
        return (
            self._program.call({"helper": helper}, self, other)
            if isinstance(other, Remote)
            else NotImplemented
        )


def _operator(helper: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._program.call({"helper": helper}, self, *arguments)


def _arithmetic(helper: str, *, swapped: bool = False) -> Callable[..., Any]:
    """An operator of numbers. Tests compare by it, as in ``abs(f(1) - 5) < 1e-6``: once a program's object was given plain data, its
    numbers are not read.
    """

    def method(self: Remote, *others: Any) -> Any:
        operands = (*others, self) if swapped else (self, *others)
        result = self._program.call({"helper": helper}, *operands)
        read = operands[:1] if helper == "round" else operands  # its other is a number of digits
        if not all(isinstance(one, Remote) and not one._given for one in read):
            if not isinstance(result, Remote):
                raise TypeError(
                    f"{helper} of an object of the program with plain data is not left to the program"
                )
            result.__dict__["_given"] = True
        return result

    return method


def _comparison(helper: str) -> Callable[..., Any]:
    return lambda self, other: self._compared(helper, other)


for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _comparison(_name))
for _name in (
    "len",
    "iter",
    "next",
    "getitem",
    "setitem",
    "delitem",
    "str",
    "repr",
    "reversed",
    "enter",
):
    setattr(Remote, f"__{_name}__", _operator(_name))
for _name in ("neg", "abs", "bool", "int", "float", "round"):
    setattr(Remote, f"__{_name}__", _arithmetic(_name))
Remote.__exit__ = lambda self, *_: self._program.call({"helper": "exit"}, self)  # type: ignore[attr-defined]
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    setattr(Remote, f"__{_name}__", _arithmetic(_name))
    setattr(Remote, f"__r{_name}__", _arithmetic(_name, swapped=True))


# --- kinds of tests --------------------------------------------------------------------------------------


def _asserts(program: _Program, request: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Statements, each a test, as in MBPP."""
    names, codes = _prepare(program, request["source"], request["setup"])
    for code in codes:
        yield lambda code=code: exec(code, names)  # type: ignore[misc]  # noqa: S102


def _check(program: _Program, request: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A function ``check`` of a candidate, as in HumanEval: one test."""
    names, (code,) = _prepare(program, [request["source"]])
    exec(code, names)  # noqa: S102
    entry = request["entry"]
    yield lambda: names["check"](_from_solution(program, entry))


def _pytest(program: _Program, request: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A file of tests for pytest, as in KodCode: each function is a test, and each set of its parameters."""
    module = ModuleType("solution")
    module.__getattr__ = lambda name: _from_solution(program, name)  # type: ignore[method-assign]
    sys.modules |= {"solution": module, "pytest": _pytest_module()}
    names, (code,) = _prepare(program, [request["source"]])
    try:
        exec(code, names)  # noqa: S102
    except ImportError as error:
        raise ImportError(
            f"{error}; tests may import from solution, pytest and the installed modules"
        ) from error
    tests = list(_collect(names))
    if not tests:
        yield lambda: None  # the statements at the top level are the test
    yield from tests


def _from_solution(program: _Program, name: str) -> Any:
    if name == "__all__":
        return program.ask({"names": True})["names"]
    if name.startswith("__"):
        raise AttributeError(name)
    found = program.get([name])
    if name not in found:
        raise AttributeError(f"the program does not define {name}")
    return found[name]


def _prepare(
    program: _Program, texts: Sequence[str], setup: Sequence[str] = ()
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


# --- what tests for pytest use ---------------------------------------------------------------------------


def _collect(names: dict[str, Any]) -> Iterator[Callable[[], None]]:
    fixtures = {name: value for name, value in names.items() if hasattr(value, "_fixture")}
    for name, value in list(names.items()):
        if name.startswith("test") and inspect.isfunction(value):
            yield from _with_parameters(value, fixtures)
        elif name.startswith("Test") and inspect.isclass(value):
            own = fixtures | {key: one for key, one in vars(value).items() if hasattr(one, "_fixture")}
            for key, method in inspect.getmembers(value, inspect.isfunction):
                if key.startswith("test"):
                    yield from _with_parameters(method, own, value)


def _with_parameters(
    test: Callable[..., Any], fixtures: dict[str, Any], owner: type | None = None
) -> Iterator[Callable[[], None]]:
    sets: list[list[dict[str, Any]]] = []
    for names, values in getattr(test, "_parameters", ()):
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
        sets.append([dict(zip(keys, one if len(keys) > 1 else (one,), strict=True)) for one in values])
    for chosen in itertools.product(*sets):
        given = {key: value for one in chosen for key, value in one.items()}
        yield lambda given=given: _run_one(test, fixtures, owner, given)  # type: ignore[misc]


def _run_one(
    test: Callable[..., Any], fixtures: dict[str, Any], owner: type | None, given: dict[str, Any]
) -> None:
    instance = owner() if owner else None
    made: dict[str, Any] = dict(given)
    finish: list[Iterator[Any]] = []

    def value_of(name: str) -> Any:
        if name not in made:
            if name not in fixtures:
                raise LookupError(f"the fixture {name!r} is not known here; only those of the file are")
            made[name] = made_by(fixtures[name])
        return made[name]

    def made_by(function: Callable[..., Any]) -> Any:
        found = call(function)
        if inspect.isgenerator(found):
            finish.append(found)
            return next(found)
        return found

    def call(function: Callable[..., Any]) -> Any:
        parameters = list(inspect.signature(function).parameters)
        bound = [instance] if owner and parameters[:1] == ["self"] else []
        return function(*bound, **{name: value_of(name) for name in parameters[len(bound) :]})

    for step in ("setup_class", "setup_method"):
        if hasattr(instance, step):
            method = getattr(instance, step)
            method(*[None] * len(inspect.signature(method).parameters))
    for fixture in fixtures.values():
        if fixture._fixture:
            call(fixture)
    call(test)
    for generator in finish:
        next(generator, None)


def _pytest_module() -> ModuleType:
    module = ModuleType("pytest")
    module.raises, module.approx, module.fixture = _raises, _Approx, _fixture  # type: ignore[attr-defined]
    module.mark, module.fail = _Mark(), _fail  # type: ignore[attr-defined]
    module.param = lambda *values, **_: values if len(values) != 1 else values[0]  # type: ignore[attr-defined]
    module.main = lambda *_: 0  # type: ignore[attr-defined]
    return module


class _Raised:
    value: BaseException
    type: type[BaseException]


@contextmanager
def _raising(expected: Any, match: str | None) -> Iterator[_Raised]:
    found = _Raised()
    try:
        yield found
    except expected as error:
        found.value, found.type = error, type(error)
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{error!r} does not match {match!r}") from error
    else:
        raise AssertionError(f"did not raise {expected}")


def _raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    if not call:
        return _raising(expected, match)
    with _raising(expected, match) as found:
        call[0](*call[1:], **named)
    return found


class _Approx:
    def __init__(
        self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False
    ) -> None:
        self._expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, other: object) -> bool:
        return self._near(self._expected, other)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, expected: Any, given: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(given, dict) and expected.keys() == given.keys()
            return same and all(self._near(value, given[key]) for key, value in expected.items())
        if isinstance(expected, list | tuple):
            same = isinstance(given, list | tuple) and len(expected) == len(given)
            return same and all(map(self._near, expected, given))
        if isinstance(expected, int | float) and isinstance(given, int | float):
            if math.isnan(expected):
                return self._nan_ok and math.isnan(given)
            relative = 0.0 if self._rel is None and self._abs is not None else self._rel or 1e-6
            return math.isclose(expected, given, rel_tol=relative, abs_tol=self._abs or 1e-12)
        return bool(expected == given)


def _fixture(*given: Any, autouse: bool = False, **_: Any) -> Any:
    def mark(function: Any) -> Any:
        function._fixture = autouse
        return function

    return mark(given[0]) if given and callable(given[0]) else mark


class _Mark:
    @staticmethod
    def parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
        def mark(function: Any) -> Any:
            function._parameters = [*getattr(function, "_parameters", ()), (names, list(values))]
            return function

        return mark

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **_: given[0] if given and callable(given[0]) else lambda function: function


def _fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


_TESTS: dict[str, Callable[[_Program, dict[str, Any]], Iterator[Callable[[], None]]]] = {
    "asserts": _asserts,
    "check": _check,
    "pytest": _pytest,
}
