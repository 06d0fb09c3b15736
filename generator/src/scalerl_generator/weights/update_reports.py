"""What vLLM's workers report of a weight update, as the actor reads it, and the errors of one."""

from __future__ import annotations

from typing import Literal

import msgspec

from scalerl_generator.vllm_replies import BadReply, ServerRefused, VllmError, decode_reply


class FetchContinues(ServerRefused):
    """A version is not read in time; the server continues to read it."""


class FetchStalled(ServerRefused):
    """A version is not read in time, and nothing of it was: the volume or the object store does not answer."""


class FetchUnreachable(ServerRefused):
    """A version is not read, since the object store does not answer the server, or refuses its credentials."""


class UpdateFailed(VllmError):
    """A weight update failed.

    ``partial``: the server holds layers of both versions and stays paused until an update succeeds. Otherwise it holds its
    old weights completely.
    """

    def __init__(self, message: str, *, partial: bool) -> None:
        super().__init__(
            f"{message}; the server holds {'a mixture of versions' if partial else 'its old weights'}"
        )
        self.partial = partial


class PublishReport(msgspec.Struct):
    """A worker's report of its last update."""

    state: Literal["whole", "partial"]
    """``partial``: the model has a mixture of versions."""
    version: int | None
    tensors: int = 0
    buckets: int = 0
    bytes: int = 0
    transfer_seconds: float = 0.0
    verify_seconds: float = 0.0
    load_seconds: float = 0.0
    finish_seconds: float = 0.0
    error: str = ""
    """Why the update failed; empty if it has not."""
    held: int | None = None
    """Version of the last complete update."""
    active: bool = False
    """vLLM considers an update open."""


class FetchReport(msgspec.Struct, frozen=True):
    """State of the fetch of a version from files by one worker (:class:`~.weight_files.WeightFetcher`)."""

    problem: str | None = None
    """Why it failed; empty if the version is in memory, None while it is read."""
    path: str = ""
    """Where the other workers map it."""
    seconds: float = 0.0
    bytes: int = 0
    """Of the version; while it is read, of all that was read."""
    unreachable: bool = False
    """Whether the object store does not answer or refuses the credentials, and no file is at fault."""


class _Reports(msgspec.Struct):
    results: list[PublishReport]


class _Joins(msgspec.Struct):
    results: list[str | None]


class _Fetches(msgspec.Struct):
    results: list[FetchReport]


_REPORTS = msgspec.json.Decoder(_Reports)
_JOINS = msgspec.json.Decoder(_Joins)
_FETCHES = msgspec.json.Decoder(_Fetches)


def read_publish_report(content: bytes) -> PublishReport:
    """Merge the workers' reports into that of the slowest worker.

    ``active`` and ``error`` are set if they are for any worker; ``state`` is ``partial`` also if the workers hold different
    versions.

    Raises:
        BadReply
    """
    reports = decode_reply(_REPORTS, content).results
    if not reports:
        raise BadReply("the answer has no worker's report")
    slowest = max(reports, key=lambda r: r.transfer_seconds + r.load_seconds)
    return msgspec.structs.replace(
        slowest,
        state="whole" if {(r.state, r.held) for r in reports} == {("whole", slowest.held)} else "partial",
        error=next((r.error for r in reports if r.error), ""),
        active=any(r.active for r in reports),
    )


def read_join_problem(content: bytes) -> str | None:
    """Why the first worker that did not join its weight group failed; empty if all joined, None while some still wait.

    Raises:
        BadReply
    """
    problems = decode_reply(_JOINS, content).results
    return next(filter(None, problems), None if None in problems else "")


def read_fetch(content: bytes) -> FetchReport:
    """Report of the first worker, which fetches for all.

    Raises:
        BadReply
    """
    reports = decode_reply(_FETCHES, content).results
    if not reports:
        raise BadReply("the answer has no worker's report")
    return reports[0]
