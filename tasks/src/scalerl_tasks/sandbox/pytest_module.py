"""What tests for pytest use of it, in the place of pytest, which may not be installed where programs run."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def collect(names: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """The tests among the globals of a file, each with each set of its parameters."""
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


def pytest_module() -> ModuleType:
    """A module with what tests import from pytest."""
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
