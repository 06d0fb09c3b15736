"""The program, in the process of its tests: stand-ins that call it in its own process, through the caller.

So a program sees only the arguments of its calls. What it returns is plain data, or a reference: :class:`Remote`. No comparison
with plain data is left to the program, so an object whose ``__eq__`` is always true equals nothing here, one whose ``__contains__``
is always true contains what it iterates over, and a number of which the program was given a part is not read from it.
"""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Callable
from typing import Any

from scalerl_tasks.sandbox import channel as messages
from scalerl_tasks.sandbox.values import decode, encode, pack

CALL = b"C"
"""Kind of a message that is passed on to the program, whose answer is passed back."""
RESULT = b"R"
"""Kind of a message about the tests: their number, then the result of each."""
_MAX_ANSWER_BYTES = 256 << 20


class Program:
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
                # It would end a loop of the tests, which then pass.
                raise RuntimeError("the program raised StopIteration")
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

    def __init__(self, program: Program, number: int, kind: str) -> None:
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
for _name in ("len", "iter", "next", "getitem", "setitem", "delitem", "str", "repr", "reversed", "enter"):
    setattr(Remote, f"__{_name}__", _operator(_name))
for _name in ("neg", "abs", "bool", "int", "float", "round"):
    setattr(Remote, f"__{_name}__", _arithmetic(_name))
Remote.__exit__ = lambda self, *_: self._program.call({"helper": "exit"}, self)  # type: ignore[attr-defined]
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    setattr(Remote, f"__{_name}__", _arithmetic(_name))
    setattr(Remote, f"__r{_name}__", _arithmetic(_name, swapped=True))
