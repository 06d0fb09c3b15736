"""What the supervisor does to bring a cluster up, as data: programs to run, programs to start, things to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """Run a program to its end."""

    argv: tuple[str, ...]
    seconds: float = 120.0
    do: str = "run"


@dataclass(frozen=True)
class Start:
    """Start a program that stays; its output goes into ``logs/<name>.log``."""

    name: str
    argv: tuple[str, ...]
    do: str = "start"


@dataclass(frozen=True)
class Wait:
    """Wait until ``url`` answers 200, ``path`` exists or ``argv`` exits 0; over when the program ``on`` ends first."""

    on: str
    url: str = ""
    path: str = ""
    argv: tuple[str, ...] = ()
    seconds: float = 400.0
    do: str = "wait"


Step = Run | Start | Wait


@dataclass(frozen=True)
class Plan:
    """A whole cluster."""

    steps: tuple[Step, ...]
    """Done in this order to bring it up."""
    ca: str
    """Whose certificates the servers show that are waited for."""
    relay: tuple[str, int] | None = None
    """Where the port goes that is held open outside of the cluster's network; None: it has none of its own."""
    own_folders: tuple[str, ...] = ()
    """Folders of the machine that programs insist on writing into: what they write goes elsewhere."""
    own_settings: tuple[str, ...] = ()
    """Settings of the whole machine that programs insist on changing: they see a copy."""
    last: tuple[Run, ...] = ()
    """Done at the end, when all programs have been killed but those of ``asked``."""
    asked: tuple[str, ...] = ()
    """Programs that are asked to end, as what they write outlives the cluster."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def argv(program: str | Path, *words: str | Path, **flags: object) -> tuple[str, ...]:
    """A command line: words, then ``--a-flag=value`` for each keyword, in order."""
    named = (f"--{name.replace('_', '-')}={_said(value)}" for name, value in flags.items())
    return (str(program), *map(str, words), *named)


def _said(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)
