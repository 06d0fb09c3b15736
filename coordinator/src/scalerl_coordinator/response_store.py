"""Stores past responses to the training prompts on disk, for the generators' drafts.

The store is a cache without the journal's durability (``docs/adr/0010-history-beside-the-journal.md``): a missing response
only costs speed. :meth:`ResponseStore.put` only queues. The store's thread writes, and drops and counts groups that it cannot
write. Readers get the complete newest group of a prompt, or nothing.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from scalerl_api.wire import MAX_RESPONSES_BYTES, PastResponse, PromptRef
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.response_index import MAX_GROUPS, ResponseIndex
from scalerl_coordinator.response_log import HistoryCounters, ResponseLog
from scalerl_coordinator.response_segments import HEAD_BYTES, Head
from scalerl_coordinator.response_similarity import SimilarityFile

log = logging.getLogger(__name__)

_QUEUE_BYTES: Final = 2**26
"""Bound on the groups that wait for the disk."""
_RESPONSE_BYTES: Final = 256
"""Memory of a response besides its tokens."""
_RETRY_SECONDS: Final = 1.0
_RESERVE_CHECK_SECONDS = 5.0
_CLOSE_SECONDS: Final = 5.0
_TOKENIZER_FILES: Final = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map*",
    "added_tokens*",
    "*.model",
)


class PastGroup(msgspec.Struct, frozen=True):
    """A group to store."""

    prompt: PromptRef
    digest: bytes
    """:func:`scalerl_api.wire.prompt_digest` of the prompt's tokens."""
    responses: list[PastResponse]
    drafts: tuple[list[int], list[int]] | None = None
    """Drafted and accepted tokens by position in a draft; None if the generator does not report them."""

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum(len(response.token_ids) + _RESPONSE_BYTES for response in self.responses)


def history_identity(train_digest: str, base_model: Path) -> bytes:
    """A 32-byte digest of the inputs of stored responses: the training prompts, and the files of the tokenizer.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(train_digest.encode())
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in base_model.glob(pattern)}):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


_decode = msgspec.msgpack.Decoder(list[PastResponse]).decode


class ResponseStore:
    """The store in ``directory``, which the journal's lock reserves for one process.

    Life cycle: construct → :meth:`start` → :meth:`put` and :meth:`lookup` from any thread → :meth:`close`. Until the thread
    has read the directory, lookups find nothing.

    Args:
        identity: the result of :func:`history_identity`; responses stored under another identity are deleted.
        max_bytes: maximum size on disk.
        lines: file that records how similar each group is to the previous one (:mod:`.response_similarity`), or None.
        difficulty: returns the difficulty of a prompt, for that file.
        max_groups: maximum number of indexed groups.
        queue_bytes: bound on the groups that wait for the disk.
        slack_seconds: see :class:`.SimilarityFile`.
    """

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        max_bytes: int,
        *,
        lines: Path | None = None,
        difficulty: Callable[[PromptRef], float | None] = lambda _: None,
        disk: Disk | None = None,
        max_groups: int = MAX_GROUPS,
        queue_bytes: int = _QUEUE_BYTES,
        slack_seconds: float = 0.5,
    ) -> None:
        disk = disk or Disk()
        self.counters = HistoryCounters()
        self._index = ResponseIndex(max_groups)
        self._log = ResponseLog(directory, identity, max_bytes, self._index, self.counters, disk)
        self._similarity = (
            None if lines is None else SimilarityFile(lines, self._log.report, disk, slack_seconds)
        )
        self._comparison_failed = False
        self._difficulty = difficulty
        self._max_queue_bytes = queue_bytes
        self._wake = threading.Condition()
        """Guards the queue and the flags."""
        self._queue: deque[PastGroup] = deque()
        self._queued_bytes = 0
        self._ready = self._closing = self._failed = False
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    # --- life cycle -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which first reads the directory."""
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, for at most ``_CLOSE_SECONDS``."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def drain(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until the directory is read and the queue is empty; returns whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: self._ready and not self._queue, timeout)

    # --- callers --------------------------------------------------------------------------------

    def put(self, group: PastGroup) -> None:
        """Queue a group for writing. Never blocks: if the queue is full, the group is dropped."""
        size = group.nbytes
        with self._wake:
            if self._failed or self._queued_bytes + size > self._max_queue_bytes:
                self._drop(group, "failed" if self._failed else "queue_full")
                return
            self._queue.append(group)
            self._queued_bytes += size
            self._wake.notify_all()

    def lookup(self, prompt: PromptRef, digest: bytes) -> bytes:
        """The newest group of a prompt, as an encoded list of :class:`PastResponse`; empty without one. Blocking I/O.

        ``digest`` is that of the prompt's tokens; a group for other tokens is not returned.
        """
        result, blob = self._find(prompt, digest)
        with self._wake:
            self.counters.lookups[result] += 1
        return blob

    def _find(self, prompt: PromptRef, digest: bytes) -> tuple[str, bytes]:
        at = self._index.newest(prompt)
        if at is None:
            return "miss", b""
        found = self._log.read(at)
        if found is None or (found[0].task, found[0].prompt) != (prompt.task, prompt.index):
            self._index.remove(prompt, at)
            return "miss", b""
        head, blob = found
        return ("hit", blob) if head.digest == digest else ("mismatch", b"")

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._recover()
            while (group := self._next()) is not None:
                try:
                    self._store(group)
                except Exception:
                    log.exception("cannot store a group in the history of past responses")
                    self._drop(group, "failed")
                with self._wake:
                    self._queue.popleft()
                    self._queued_bytes -= group.nbytes
                    self._wake.notify_all()
            self._log.finish_segment()
        except Exception:
            log.exception("the history of past responses failed; the run continues without it")
        finally:
            with self._wake:
                self._failed = True
                for group in self._queue:
                    self._drop(group, "failed")
                self._queue.clear()
                self._wake.notify_all()

    def _recover(self) -> None:
        while not self._closing:
            try:
                self._log.recover()
                break
            except OSError as error:
                self._log.report_unreadable(error)
            with self._wake:
                self._wake.wait_for(lambda: self._closing, _RETRY_SECONDS)
        with self._wake:
            self._ready = True
            self._wake.notify_all()

    def _next(self) -> PastGroup | None:
        """Wait for the next group to write, which stays queued; None once the queue is empty and the store is closing."""
        if self._similarity is not None and not self._queue:
            self._similarity.flush()
        while True:
            with self._wake:
                if self._wake.wait_for(lambda: self._queue or self._closing, _RESERVE_CHECK_SECONDS):
                    return self._queue[0] if self._queue else None
            self._log.keep_reserve()

    def _store(self, group: PastGroup) -> None:
        blob = msgspec.msgpack.encode(group.responses)
        size = HEAD_BYTES + len(blob)
        if size > min(MAX_RESPONSES_BYTES, self._log.max_frame_bytes):
            self._drop(group, "too_large")
            return
        if self._log.waits:
            self._drop(group, "disk")
            return
        previous = self._previous(group)
        visit = 0 if previous is None else previous[0].visit + 1
        prompt = group.prompt.task, group.prompt.index
        head = Head(len(blob), zlib.crc32(blob), *prompt, group.digest, visit, len(group.responses))
        if self._similarity is not None and previous is not None:
            try:
                old = _decode(previous[1])
                self._similarity.add(
                    prompt, visit, group.responses, old, group.drafts, self._difficulty(group.prompt)
                )
            except Exception:  # the group can be stored nevertheless
                log.log(
                    logging.DEBUG if self._comparison_failed else logging.ERROR,
                    "cannot compare a group with the previous one of its prompt",
                    exc_info=True,
                )
                self._comparison_failed = True
        try:
            if not self._log.make_room(size):
                self._drop(group, "no_space")
                return
            self._index.add(head, self._log.append(head, blob))
            self.counters.stored += len(group.responses)
            self.counters.prompts = self._index.prompts
        except OSError as error:
            self._log.yield_space(error)
            self._drop(group, "disk")

    def _previous(self, group: PastGroup) -> tuple[Head, bytes] | None:
        """The newest stored group of the same prompt with the same tokens."""
        at = self._index.newest(group.prompt)
        found = None if at is None else self._log.read(at)
        return found if found is not None and found[0].digest == group.digest else None

    def _drop(self, group: PastGroup, reason: str) -> None:
        self.counters.dropped[reason] += len(group.responses)
