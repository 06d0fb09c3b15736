"""Messages between pool, fork server and graders.

Only the pool pickles, and only its own objects (a prompt may contain any Python object of its task). A grader has
processed hostile text, so its answers are records of a fixed layout.

Pool → grader, a socket: ``<Q`` length, then a pickled :class:`Request` or :class:`CheckRequest`.
Grader → pool, a pipe: one record per completion or checked prompt, in order, written immediately, so that none is lost when the grader
dies: :data:`RECORD`, then the verdict's parts as ``<d`` in the order declared, then the error text (empty for a verdict; messages of an environment). After a record of
kind :data:`RETIRED` the grader exits, and the pool replaces it.
Waking the pool takes longer than grading most completions, so a record does not wake it. It reads the pipe when a byte arrives on the socket,
which the grader sends at the end of a request, when the socket closes, and every :data:`POLL_SECONDS` in between.

Pool ↔ fork server, packets (SOCK_SEQPACKET): a one-byte kind, ``<Q`` token or pid, then text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verifiers import VerifierConfig

LENGTH = struct.Struct("<Q")
RECORD = struct.Struct("<BdHH")
"""Kind, score, number of parts that follow, length of the error text that follows, in bytes."""

POLL_SECONDS = 0.05

SCORED = 0
FAILED = 1
RETIRED = 2
ANSWERED = 3
"""As :data:`SCORED`, of a completion with an answer."""
UNANSWERED = 4
"""As :data:`SCORED`, of a completion without one."""
CONTINUED = 5
"""As :data:`SCORED`, of an episode that goes on; in place of an error's text, the record has the environment's messages."""

CONTROL = struct.Struct("<cQ")
FORK = b"F"
"""Pool: fork a grader for the attached socket and pipe; the reply repeats the number, a token."""
KILL = b"K"
"""Pool: kill the grader with this pid, if it still exists."""
READY = b"R"
"""Fork server: the verifier is open; the text lists the names of its verdicts' parts, separated by commas. The number is 1 if it
scores groups as a whole, else 0."""
BROKEN = b"B"
"""Fork server: the verifier cannot be opened; the text has the reason. The fork server exits."""
FORKED = b"P"
"""Fork server: token, then ``<Q`` the pid."""
FORK_FAILED = b"X"
"""Fork server: token, then the reason."""

MAX_PACKET_BYTES = 64 * 1024
MAX_ERROR_BYTES = 300


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one grader; ``memory_bytes`` is in addition to its memory after the fork."""

    timeout_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The fork server's settings, sent once at its start."""

    verifier: VerifierConfig
    limits: Limits
    show_output: bool = False
    """Whether output of graders goes to the standard error of the caller."""


@dataclass(frozen=True, slots=True)
class Request:
    """Completions of one prompt, graded in order."""

    prompt: Prompt
    completions: list[str]


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Prompts to check (:meth:`~scalerl_tasks.verifiers.Verifier.check`), in order. A record of kind :data:`SCORED` means that the prompt
    can be graded."""

    prompts: list[Prompt]


def record(
    kind: int, score: float = 0.0, parts: Sequence[float] = (), error: str = "", messages: bytes = b""
) -> bytes:
    """A record as bytes; the error is truncated to :data:`MAX_ERROR_BYTES`. ``messages``: in place of an error."""
    if not parts and not error and not messages:
        return RECORD.pack(kind, score, 0, 0)
    text = messages or error.encode("utf-8", "backslashreplace")[:MAX_ERROR_BYTES]
    return RECORD.pack(kind, score, len(parts), len(text)) + struct.pack(f"<{len(parts)}d", *parts) + text
