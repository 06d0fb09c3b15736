"""Splits a source into training and held-out prompts, so that no held-out text is ever trained on."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from scalerl_tasks.errors import SplitError
from scalerl_tasks.prompts import Prompt, PromptSource, check_index

_VERSION = "1"  # part of the digests; a change of the split must change them
_MAX_PROBES = 64
DEFAULT_SIZE = 1000


class HeldOut:
    """Held-out prompts: selected by the seed, all with different texts, in a fixed order."""

    def __init__(
        self,
        source: PromptSource,
        indices: list[int],
        texts: frozenset[bytes],
        digest: str,
        labels: list[dict[str, str]],
        graphs: HeldOutGraphs | None = None,
    ) -> None:
        self._source = source
        self.indices = indices
        """Indices in the source, in the order of the set."""
        self.texts = texts
        """Keys of the prompts' texts."""
        self.digest = digest
        self.labels = labels
        """Labels of each prompt: those of the source, or its difficulty."""
        self.graphs = graphs
        """The graphs that all these prompts have and no training prompt has; None if they may have any."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Prompt:
        check_index(index, len(self.indices))
        return self._source[self.indices[index]]

    def difficulty(self, index: int, /) -> float | None:
        check_index(index, len(self.indices))
        return self._source.difficulty(self.indices[index])


class Train:
    """All other prompts, in the source's order.

    Generated tasks repeat prompts, so a prompt that was not selected can still have a held-out text. Finding all of them would
    require generating the whole source. Instead, a read replaces such a prompt with another one, found by probing from a hash
    of the position: the same at every read and on every machine. The replacement then has two positions.
    """

    def __init__(
        self,
        source: PromptSource,
        held_out: HeldOut,
        others: Sequence[HeldOut],
        digest: str,
        left_out: Sequence[int] = (),
    ) -> None:
        self._source = source
        self._held_out = sorted({*held_out.indices, *left_out})
        # The p-th index that is not held out is p + (number of held-out indices before it); at these positions that
        # number increases.
        self._steps = [index - rank for rank, index in enumerate(self._held_out)]
        self._held_out_texts = held_out.texts
        self._texts = held_out.texts.union(*(other.texts for other in others))
        self._graphs = [one.graphs for one in (held_out, *others) if one.graphs is not None]
        self.digest = digest

    def __len__(self) -> int:
        return len(self._source) - len(self._held_out)

    def __getitem__(self, index: int, /) -> Prompt:
        check_index(index, len(self))
        for position in self._candidates(index):
            prompt = self._source[self._source_index(position)]
            if not self.excludes(prompt):
                return prompt
        raise SplitError(
            "every prompt that is not held out has the text or the graph of one that is: the source has too few different "
            "prompts; widen the task's parameters or lower task.heldOut.size"
        )

    def difficulty(self, index: int, /) -> float | None:
        """The difficulty of the source's prompt at this position, even if a read replaces that prompt because its text is held
        out: only a read could detect this."""
        check_index(index, len(self))
        return self._source.difficulty(self._source_index(index))

    def excludes(self, prompt: Prompt, /) -> bool:
        """Whether the prompt, of any source, has a held-out text or a held-out graph."""
        return _text_key(prompt) in self._texts or any(prompt in graphs for graphs in self._graphs)

    def shared(self, prompts: HeldOut) -> list[Prompt]:
        """The prompts of the source that are excluded from training only because they have the text of one of ``prompts``. Reads
        the whole source."""
        texts = prompts.texts - self._held_out_texts
        return [
            prompt
            for prompt in map(self._source.__getitem__, range(len(self._source)))
            if _text_key(prompt) in texts
        ]

    def _source_index(self, position: int) -> int:
        return position + bisect.bisect_right(self._steps, position)

    def _candidates(self, position: int) -> Iterator[int]:
        yield position
        for probe in range(_MAX_PROBES):
            yield _draw(f"train/{self.digest}/{position}/{probe}", len(self))
        # The source consists almost wholly of held-out texts: read all of it before giving up.
        yield from range(len(self))


class HeldOutGraphs:
    """The graphs that are held out: a share of all, chosen by hash, so that each number of operations loses the same share.

    Args:
        share: between 0 and 1.
    """

    def __init__(self, share: Fraction, seed: int) -> None:
        self._limit, self._seed = math.floor(share * 2**64), seed
        self.identity = f"{share}/{seed}"

    def __contains__(self, prompt: Prompt) -> bool:
        """Whether the prompt's graph is held out. A prompt without a graph is not."""
        return bool(prompt.graph) and _draw(f"graph/{self._seed}/{prompt.graph}", 2**64) < self._limit


def split_held_out(
    source: PromptSource,
    size: int,
    seed: int,
    others: Sequence[HeldOut] = (),
    graphs: HeldOutGraphs | None = None,
) -> tuple[Train, HeldOut]:
    """Split a source into train and held-out prompts.

    Both depend only on ``source.digest``, ``size`` and ``seed``, and the training prompts also on the digests of ``others``. No
    text is in both. The split costs about ``size`` reads of the source (more if texts repeat) and memory for ``size`` hashes,
    independent of the source's length.

    Args:
        size: number of held-out prompts, all with different texts (1,000 in ScaleRL [P]).
        others: prompts of other sources whose texts are also excluded from the training prompts.
        graphs: if given, held-out prompts have only these graphs, and training prompts have none of them.

    Raises:
        SplitError: the source has too few prompts, or too few different ones.
    """
    held_out = choose_held_out(source, size, seed, graphs)
    return open_train(source, held_out, size, seed, others), held_out


def choose_held_out(
    source: PromptSource, size: int, seed: int, graphs: HeldOutGraphs | None = None
) -> HeldOut:
    """The held-out prompts of :func:`split_held_out`, whose documentation describes arguments and errors."""
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
    return _chosen(source, size, seed, "task.heldOut.size", graphs)


def open_train(
    source: PromptSource,
    held_out: HeldOut,
    size: int,
    seed: int,
    others: Sequence[HeldOut] = (),
    left_out: Sequence[int] = (),
) -> Train:
    """The training prompts of :func:`split_held_out`, whose documentation describes arguments and errors.

    Args:
        left_out: indices in the source of prompts that are not trained on because they overlap with held-out ones.
    """
    identity = "/".join([_identity(source, size, seed, held_out.graphs), *(other.digest for other in others)])
    if left_out:
        identity += f"/overlap/{_sha256(repr(left_out))}"
    train = Train(source, held_out, others, _sha256(f"train/{identity}"), left_out)
    if not len(train):
        raise SplitError(
            "every prompt that is not held out overlaps with one that is; raise task.dataset.filter.overlap, or leave it out"
        )
    train[0]  # raises if no prompt is left to train on
    return train


def select_prompts(source: PromptSource, size: int | None, seed: int) -> HeldOut:
    """Select prompts of a source that is not trained on, in the same way as :func:`split_held_out`.

    Args:
        size: number of prompts, all with different texts; None: :data:`DEFAULT_SIZE`, or all of a source with fewer.

    Raises:
        SplitError: the source has fewer different prompts than ``size``.
    """
    if size is not None and size > len(source):
        raise SplitError(f"{size} prompts asked for, but the source has {len(source)}; lower size")
    return _chosen(source, size, seed, "size")


def _chosen(
    source: PromptSource, size: int | None, seed: int, field: str, graphs: HeldOutGraphs | None = None
) -> HeldOut:
    indices: list[int] = []
    texts: set[bytes] = set()
    labels: list[dict[str, str]] = []
    for index in _shuffled(len(source), f"split/{_VERSION}/{source.digest}/{seed}"):
        prompt = source[index]
        if graphs is not None and prompt not in graphs:
            continue
        if (key := _text_key(prompt)) not in texts:
            texts.add(key)
            labels.append(_labels(prompt))
            indices.append(index)
            if len(indices) == (DEFAULT_SIZE if size is None else size):
                break
    else:
        if size is not None:
            raise SplitError(
                f"{size} different prompts asked for, but the source has only {len(texts)} different texts"
                f"{'' if graphs is None else ' with held-out graphs'}; lower {field} or widen the task's parameters"
            )
    identity = _identity(source, len(indices), seed, graphs)
    return HeldOut(source, indices, frozenset(texts), _sha256(f"held-out/{identity}"), labels, graphs)


def _identity(source: PromptSource, size: int, seed: int, graphs: HeldOutGraphs | None) -> str:
    parts = [
        _VERSION,
        source.digest,
        str(size),
        str(seed),
        *([f"graphs/{graphs.identity}"] if graphs else []),
    ]
    return "/".join(parts)


def _labels(prompt: Prompt) -> dict[str, str]:
    if prompt.labels or prompt.difficulty is None:
        return dict(prompt.labels)
    return {"difficulty": f"{prompt.difficulty:g}"}


def _shuffled(total: int, key: str) -> Iterator[int]:
    """A permutation of 0..total−1 determined by ``key``: Fisher–Yates, with memory only for the drawn numbers.

    It does not use ``random``, because an evaluation set must not change with the Python release.
    """
    moved: dict[int, int] = {}
    for drawn in range(total):
        pick = drawn + _draw(f"{key}/{drawn}", total - drawn)
        yield moved.get(pick, pick)
        moved[pick] = moved.pop(drawn, drawn)


def _draw(key: str, below: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:16]) % below


def text_key(text: str, turns: Sequence[tuple[str, str]] = ()) -> bytes:
    """Key of a prompt's text, with the messages before it: equal for prompts that ask the same."""
    key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    for message in turns:
        key.update(repr(tuple(message)).encode("utf-8", "surrogatepass"))
    return key.digest()


def _text_key(prompt: Prompt) -> bytes:
    return text_key(prompt.text, prompt.turns)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
