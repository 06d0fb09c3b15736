"""The bytes between pool, fork server and graders.

Only the pool pickles, and only what it holds itself (a prompt may carry any Python object of its task's).
What comes back from a grader, which has touched hostile text, is plain records of fixed meaning.

Pool → grader, a stream: ``<Q`` length, then a pickled :class:`Request`.
Grader → pool, a stream: one record per completion, in order, sent as soon as it is known: :data:`RECORD` then
the error text (empty for a score). A record of kind :data:`RETIRED` says that the grader leaves and wants a
successor.

Pool ↔ fork server, packets (SOCK_SEQPACKET): a one-byte kind, ``<Q`` token or pid, then text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verifiers import VerifierConfig

LENGTH = struct.Struct("<Q")
RECORD = struct.Struct("<BdH")
"""kind, score, bytes of error text that follow."""

SCORED = 0
FAILED = 1
RETIRED = 2

CONTROL = struct.Struct("<cQ")
FORK = b"F"
"""Pool: fork a grader for the socket that comes along; the number is a token to answer with."""
KILL = b"K"
"""Pool: kill the grader with this pid, if it is still one."""
READY = b"R"
"""Fork server: the verifier is open."""
BROKEN = b"B"
"""Fork server: the verifier cannot be opened; text says why. It exits."""
FORKED = b"P"
"""Fork server: token, then ``<Q`` the pid."""
FORK_FAILED = b"X"
"""Fork server: token, then the reason."""

MAX_PACKET_BYTES = 64 * 1024
MAX_ERROR_BYTES = 300


@dataclass(frozen=True, slots=True)
class Limits:
    """What one grader may use; ``memory_bytes`` is on top of what it has at birth."""

    timeout_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What the fork server is told once, at its start."""

    verifier: VerifierConfig
    limits: Limits


@dataclass(frozen=True, slots=True)
class Request:
    """Completions of one prompt, to be graded in order."""

    prompt: Prompt
    completions: list[str]


def record(kind: int, score: float = 0.0, error: str = "") -> bytes:
    """A record as bytes; the error is cut to :data:`MAX_ERROR_BYTES`."""
    text = error.encode("utf-8", "backslashreplace")[:MAX_ERROR_BYTES]
    return RECORD.pack(kind, score, len(text)) + text
