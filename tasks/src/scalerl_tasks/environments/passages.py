"""Search in the passages of a JSONL file, by BM25."""

from __future__ import annotations

import heapq
import json
import math
import re
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Final

from scalerl_tasks.errors import VerifierError

MAX_FILE_BYTES: Final = 32 << 20
"""The index takes about seven times as much memory in each process."""
MAX_WORDS: Final = 32
"""Of a query; its rarest are used."""
_K1, _B = 1.2, 0.75  # Robertson and Zaragoza 2009, section 3.5: k1 from 1.2 to 2, b from 0.5 to 0.8
_WORD = re.compile(r"\w+")


class Passages:
    """The passages of a file: each line an object with ``text``, and ``title`` if it has one.

    The weight of a word is that of Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", equation 3.15, with
    the inverse document frequency ``ln(1 + (N - n + 1/2) / (n + 1/2))``, which is positive.

    Raises:
        VerifierError: the file cannot be read, or a line is no such object.
    """

    def __init__(self, path: str) -> None:
        self.texts: list[str] = []
        self._postings: dict[str, tuple[array[int], array[float]]] = {}
        lengths, where = array("d"), "environment.parameters.tools: search.path"
        try:
            if (size := Path(path).stat().st_size) > MAX_FILE_BYTES:
                raise VerifierError(
                    f"{where}: {path} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}: search a part of it"
                )
            with Path(path).open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        lengths.append(self._add(line, f"{where}: {path}, line {number}"))
        except (OSError, UnicodeDecodeError) as error:
            raise VerifierError(f"{where}: {path} cannot be read: {error}") from error
        if not self.texts:
            raise VerifierError(f"{where}: {path} has no lines")
        mean = sum(lengths) / len(lengths) or 1.0
        self._norms = array("d", (_K1 * (1 - _B + _B * length / mean) for length in lengths))

    def _add(self, line: str, where: str) -> int:
        """Add a passage; returns its number of words."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise VerifierError(f"{where}: {error}") from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise VerifierError(f"{where}: it has no text; write an object with a string text on each line")
        title = row.get("title")
        whole = f"{title}\n{text}" if isinstance(title, str) else text
        words = Counter(_words(whole))
        for word, count in words.items():
            passages, counts = self._postings.setdefault(word, (array("l"), array("d")))
            passages.append(len(self.texts))
            counts.append(count)
        self.texts.append(whole)
        return words.total()

    def search(self, query: str, results: int, deadline: float = math.inf) -> list[str]:
        """The passages that fit best, at most ``results``; those with equal weights in the order of the file. Of a query of more than
        :data:`MAX_WORDS` words that passages have, the rarest are used.

        Raises:
            ValueError: it was not done by ``deadline``, on the monotonic clock.
        """
        weights: dict[int, float] = {}
        known = [word for word in dict.fromkeys(_words(query)) if word in self._postings]
        rarest = set(heapq.nsmallest(MAX_WORDS, known, key=lambda word: len(self._postings[word][0])))
        for word in filter(rarest.__contains__, known):
            if time.monotonic() > deadline:
                raise ValueError("the search took too long: search for fewer or rarer words")
            passages, counts = self._postings[word]
            found = len(passages)
            rarity = math.log(1 + (len(self.texts) - found + 0.5) / (found + 0.5))
            for passage, count in zip(passages, counts, strict=True):
                weight = rarity * count * (_K1 + 1) / (count + self._norms[passage])
                weights[passage] = weights.get(passage, 0.0) + weight
        best = heapq.nsmallest(results, weights, key=lambda passage: (-weights[passage], passage))
        return [self.texts[passage] for passage in best]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
