"""Takes a held-out set from a source, so that no held-out text is ever trained on."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator

from scalerl_tasks.errors import SplitError
from scalerl_tasks.prompts import Prompt, PromptSource, check_index

_VERSION = "1"  # part of the digests: another way to split gives other sets
_MAX_PROBES = 64


class HeldOut:
    """The held-out prompts: chosen by the seed, all with different texts, in a fixed order."""

    def __init__(
        self, source: PromptSource, indices: list[int], digest: str, labels: list[dict[str, str]]
    ) -> None:
        self._source = source
        self._indices = indices
        self._digest = digest
        self.labels = labels
        """Of each prompt: those that the source gives, or its difficulty."""

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> Prompt:
        check_index(index, len(self._indices))
        return self._source[self._indices[index]]

    def difficulty(self, index: int, /) -> float | None:
        check_index(index, len(self._indices))
        return self._source.difficulty(self._indices[index])


class Train:
    """All other prompts, in the source's order.

    Generated tasks repeat themselves, so a prompt that was not chosen can still have a held-out text. To find all of them
    would mean to generate the whole source. Instead, another prompt replaces such a prompt at its position, found by
    probing from a hash of the position: the same at every read and on every machine. It then has two positions.
    """

    def __init__(
        self, source: PromptSource, held_out: list[int], texts: frozenset[bytes], digest: str
    ) -> None:
        self._source = source
        self._held_out = sorted(held_out)
        # The p-th index that is not held out is p + (number of held-out indices before it); at these positions that
        # number increases.
        self._steps = [index - rank for rank, index in enumerate(self._held_out)]
        self._texts = texts
        self._digest = digest

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self._source) - len(self._held_out)

    def __getitem__(self, index: int, /) -> Prompt:
        check_index(index, len(self))
        for position in self._candidates(index):
            prompt = self._source[self._source_index(position)]
            if not self.excludes(prompt):
                return prompt
        raise SplitError(
            "every prompt that is not held out has the text of one that is: the source has too few different "
            "prompts; widen the task's parameters or lower task.heldOut.size"
        )

    def difficulty(self, index: int, /) -> float | None:
        """Of the source's prompt at this place: not of the one that replaces it where its text is held out, which only
        reading both can tell."""
        check_index(index, len(self))
        return self._source.difficulty(self._source_index(index))

    def excludes(self, prompt: Prompt, /) -> bool:
        """Whether the prompt, of any source, has a held-out text."""
        return _text_key(prompt) in self._texts

    def _source_index(self, position: int) -> int:
        return position + bisect.bisect_right(self._steps, position)

    def _candidates(self, position: int) -> Iterator[int]:
        yield position
        for probe in range(_MAX_PROBES):
            yield _draw(f"train/{self._digest}/{position}/{probe}", len(self))
        # A source that consists almost wholly of held-out texts: read all of it before giving up.
        yield from range(len(self))


def split_held_out(source: PromptSource, size: int, seed: int) -> tuple[Train, HeldOut]:
    """Split a source into train and held-out prompts.

    Both depend only on ``source.digest``, ``size`` and ``seed``. No text is in both. Costs about ``size``
    reads of the source (more where texts repeat), and memory for ``size`` hashes, whatever the source's
    length.

    Args:
        source: the source to split.
        size: number of held-out prompts, all with different texts (1,000 in ScaleRL [P]).
        seed: selects them.

    Raises:
        SplitError: the source has too few prompts, or too few different ones.
    """
    total = len(source)
    if size < 1:
        raise SplitError(
            f"the held-out set must have at least one prompt, {size} asked for (task.heldOut.size)"
        )
    if size >= total:
        raise SplitError(
            f"{size} held-out prompts asked for, but the source has {total}, and at least one must be left to "
            f"train on; lower task.heldOut.size"
        )
    indices: list[int] = []
    texts: set[bytes] = set()
    labels: list[dict[str, str]] = []
    for index in _shuffled(total, f"split/{_VERSION}/{source.digest}/{seed}"):
        prompt = source[index]
        if (key := _text_key(prompt)) not in texts:
            texts.add(key)
            labels.append(_labels(prompt))
            indices.append(index)
            if len(indices) == size:
                break
    else:
        raise SplitError(
            f"{size} different held-out prompts asked for, but the source has only {len(texts)} different texts; "
            f"lower task.heldOut.size or widen the task's parameters"
        )
    identity = f"{_VERSION}/{source.digest}/{size}/{seed}"
    train = Train(source, indices, frozenset(texts), _sha256(f"train/{identity}"))
    train[0]  # raises if no prompt is left to train on
    return train, HeldOut(source, indices, _sha256(f"held-out/{identity}"), labels)


def _labels(prompt: Prompt) -> dict[str, str]:
    if prompt.labels or prompt.difficulty is None:
        return dict(prompt.labels)
    return {"difficulty": f"{prompt.difficulty:g}"}


def _shuffled(total: int, key: str) -> Iterator[int]:
    """All of 0..total−1 in an order set by ``key``: Fisher–Yates, with memory only for the drawn numbers.

    Not by ``random``: an evaluation set must not change with the Python release.
    """
    moved: dict[int, int] = {}
    for drawn in range(total):
        pick = drawn + _draw(f"{key}/{drawn}", total - drawn)
        yield moved.get(pick, pick)
        moved[pick] = moved.pop(drawn, drawn)


def _draw(key: str, below: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:16]) % below


def _text_key(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
