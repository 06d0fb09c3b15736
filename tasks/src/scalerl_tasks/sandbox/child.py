"""What runs in the process of a program, after the caller's first message: a script, or functions that are called."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import json
import operator
import os
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from scalerl_tasks.sandbox import channel as messages
from scalerl_tasks.sandbox.values import decode, encode, pack

FAILED = 70
"""Exit status of a process that could not begin."""
NOT_COMPILED = 71
"""Exit status of a script that does not compile."""
NAME = "solution"
"""Name of the program's module for tests."""

_MAX_REQUEST_BYTES = 256 << 20
_RECURSION_LIMIT = 50_000
_MAX_ERROR_CHARACTERS = 300
_SHARED = "typing collections heapq bisect math itertools functools string random datetime"
"""Modules whose names a program has without importing them, as with the harness of LiveCodeBench."""
_IMPORTED = _SHARED + " re copy statistics operator io json sys decimal fractions dataclasses abc enum time"


def warm_up() -> None:
    """Import what programs use, before the first fork."""
    importlib.import_module("scalerl_tasks.sandbox.tester")
    sys.dont_write_bytecode = True
    modules = {name: importlib.import_module(name) for name in _IMPORTED.split()}
    names: dict[str, Any] = dict(modules)
    for name in _SHARED.split():
        public = getattr(modules[name], "__all__", None) or dir(modules[name])
        names |= {key: getattr(modules[name], key) for key in public if not key.startswith("_")}
    # Builtins, not copied into each program's globals: that would take a tenth of its time.
    vars(builtins).update({name: value for name, value in names.items() if not hasattr(builtins, name)})
    modules["random"].seed(0)
    # Of descriptors that are replaced in each program's process.
    sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    exec(compile("import math\nclass A:\n    def f(self): return 1", "warm", "exec"), {})  # noqa: S102


def main(channel: socket.socket, enter_filter: Callable[[], None], max_bytes: int) -> NoReturn:
    """Serve the caller's first message; never returns."""
    request = json.loads(messages.receive(channel, _MAX_REQUEST_BYTES))
    sys.setrecursionlimit(_RECURSION_LIMIT)
    if "tests" in request:
        from scalerl_tasks.sandbox import tester

        enter_filter()
        tester.run(channel, request)
    elif "stdin" in request:
        _run_script(channel, request["source"], request["stdin"], enter_filter)
    else:
        enter_filter()
        _Functions(channel, request["source"], max_bytes).serve()
    os._exit(0)


def _run_script(
    channel: socket.socket, source: str, stdin: str, enter_filter: Callable[[], None]
) -> NoReturn:
    file = os.memfd_create("stdin")
    data = memoryview(stdin.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    os.dup2(channel.fileno(), 1)
    channel.close()
    enter_filter()
    status = 0
    try:
        code = compile(source, f"{NAME}.py", "exec", dont_inherit=True)
    except BaseException:
        os._exit(NOT_COMPILED)
    try:
        exec(code, _new_main())  # noqa: S102
    except SystemExit as end:
        status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        status = 1
    with contextlib.suppress(BaseException):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads, as the interpreter does at its end
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:
        status = status or 1
    os._exit(status & 0xFF)


def _new_main(name: str = "__main__") -> dict[str, Any]:
    module = ModuleType(name)
    sys.modules[name] = module
    sys.argv = [f"{NAME}.py"]
    return module.__dict__


class _Functions:
    """Calls a program's functions for the caller. Values of other classes stay here; the caller has references to them."""

    def __init__(self, channel: socket.socket, source: str, max_bytes: int) -> None:
        self._channel = channel
        self._source = source
        self._max_bytes = max_bytes
        self._kept: list[Any] = []
        self._names: dict[str, Any] = {}

    def serve(self) -> None:
        """Run the program's top level, then answer requests until the caller closes."""
        try:
            code = compile(self._source, f"{NAME}.py", "exec", dont_inherit=True)
        except BaseException as error:
            self._send({"compiled": False} | self._raised(error))
            return
        self._names = _new_main(NAME)
        try:
            exec(code, self._names)  # noqa: S102
        except BaseException as error:
            self._send({"compiled": True} | self._raised(error))
            return
        self._send({"compiled": True})
        while True:
            try:
                request = json.loads(messages.receive(self._channel, _MAX_REQUEST_BYTES))
            except (messages.ChannelError, OSError):
                return
            try:
                self._send(self._answer(request))
            except (BrokenPipeError, ConnectionError):
                return

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "get" in request:
                found = [name for name in request["get"] if name in self._names]
                return {"values": {name: encode(self._names[name], self._refer) for name in found}}
            if "names" in request:
                return {"names": [name for name in self._names if not name.startswith("_")]}
            arguments = decode(request["arguments"], self._resolve)
            named = {name: decode(value, self._resolve) for name, value in request.get("named", {}).items()}
            before = encode(arguments, self._refer) if request.get("mutated") else None
            value = self._callee(request)(*arguments, **named)
            answer = {"value": encode(value, self._refer)}
            if before is not None:
                after = encode(arguments, self._refer)
                changed = {
                    at: new for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
                }
                answer |= {"changed": changed} if changed else {}
            return answer
        except BaseException as error:  # also SystemExit: a call that exits is one that raises
            return self._raised(error)

    def _callee(self, request: dict[str, Any]) -> Callable[..., Any]:
        callee: Callable[..., Any]
        if "helper" in request:
            callee = _HELPERS[request["helper"]]
        elif "object" in request:
            callee = decode(request["object"], self._resolve)
        else:
            name = request["function"]
            solution = self._names.get("Solution")
            callee = self._names.get(name)  # type: ignore[assignment]
            if callee is None and solution is not None:
                callee = getattr(solution(), name)
            if callee is None:
                raise NameError(f"the program does not define {name}")
        return callee

    def _refer(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": value.__name__, "of": _builtin_base(value)}
        self._kept.append(value)
        return {"object": len(self._kept) - 1, "of": type(value).__name__}

    def _resolve(self, data: dict[str, Any]) -> Any:
        if "exception" in data:
            return self._names.get(data["exception"]) or getattr(builtins, data["exception"])
        return self._kept[data["object"]]

    def _raised(self, error: BaseException) -> dict[str, Any]:
        try:
            text = str(error)[:_MAX_ERROR_CHARACTERS]
        except BaseException:
            text = ""
        kind = type(error)
        return {"raised": {"exception": kind.__name__, "of": _builtin_base(kind)}, "text": text}

    def _send(self, answer: dict[str, Any]) -> None:
        data = pack(answer)
        if len(data) > self._max_bytes:
            data = pack(
                self._raised(
                    ValueError(f"a value of {len(data):,} bytes, over the limit of {self._max_bytes:,}")
                )
            )
        messages.send(self._channel, data)


def _builtin_base(kind: type[BaseException]) -> str:
    names = (base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)
    return str(next(names))


_OPERATORS = """
eq ne lt le gt ge contains getitem setitem delitem add sub mul truediv floordiv mod pow matmul neg abs
"""
_BUILTINS = "len iter next str repr bool hash int float round isinstance getattr setattr reversed"
_HELPERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
    **{name: getattr(operator, f"{name}_") for name in ("and", "or")},
    **{name: getattr(builtins, name) for name in _BUILTINS.split()},
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
}
