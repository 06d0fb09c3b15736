"""Measures the log-probability mismatch between trainer and generators at one version, on sequences of the last batch, or of a fixed text
before the first, and judges which generators must not use the version.

Both score the sequences at temperature 1. :mod:`scalerl_trainer.algo.mismatch` has the estimators.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from scalerl_api import endpoints, wire
from scalerl_api.mismatch import POSITIONS, PROBE
from scalerl_api.source import PromptSpec
from scalerl_api.spec import RunSpec
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.algo.mismatch import (
    RatioStatistics,
    by_position,
    k3_estimates,
    position_buckets,
    ratio_table,
)
from scalerl_trainer.packing import Sequence as PackedSequence
from scalerl_trainer.publish.actor_control import ActorControl

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0
OUTLIER_LIMITS = 20.0
"""The most that one token counts in the check against the limit, in limits: a twentieth of the tokens decide."""
MIN_COMPARED_TOKENS = 64
"""A batch with fewer, over all sequences, is not probed: of 64, four tokens have to be outliers to exceed a limit."""
PROBE_TOKENS = 8192
"""Tokens of a probe besides the sequence with its longest completion, prompts included. A token counts at most ``OUTLIER_LIMITS`` = 20 times the limit, so a mean of k3
at the limit has a standard deviation of at most √(19 / n) of it: 5 % at this n. More only cost time."""
START_SEQUENCES = 32
"""Completions that the weights are compared on with those of the start."""
MIN_PROBED_TOKENS = 64
"""Of a completion, so that most of what is computed is also compared."""

_INT32 = np.dtype("<i4")
_TEXT: Final = """\
A train leaves the station at 9:15 and travels 84 kilometres in 70 minutes. Its average speed is 84 / 70 * 60 = 72 km/h.
The second train travels at 96 km/h, so it needs 84 / 96 * 60 = 52.5 minutes for the same distance.

def greatest_common_divisor(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a

Let x + y = 12 and x - y = 4. Adding both equations gives 2x = 16, so x = 8 and y = 4. Check: 8 + 4 = 12 and 8 - 4 = 4.
Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain, because the air pressure is lower
there. The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29; their sum is 129.
"""
_PARTS: Final = 4


@dataclass(frozen=True)
class ProbeSequence:
    """A sequence to score."""

    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    """Token ids of prompt and completion."""
    prompt_tokens: int
    """Number of prompt tokens, which are not scored."""

    @property
    def sequence(self) -> PackedSequence:
        """Prompt and completion for the engine."""
        prompt, completion = np.split(self.token_ids, [self.prompt_tokens])
        return PackedSequence(prompt.tolist(), completion.tolist())


@dataclass(frozen=True)
class Measured:
    """The mismatch of several members at one version."""

    stats: dict[str, float]
    """For metrics.jsonl: ``probe_kl`` (k3, mean over tokens) and ``probe_tokens``, also by position, and
    ``probe_max_difference``, of the first member that answered. If none did, only ``probe_failed``: a failed measurement
    must not stop the training."""
    k3_n: dict[str, torch.Tensor]
    """k3 estimate of each token by member id, of the members that answered, float64 ``[N]``."""

    def above(self, limit: float) -> list[str]:
        """Ids of the members whose mean is above ``limit``, or not a number.

        A token counts at most :data:`OUTLIER_LIMITS` times the limit. Rounding makes mixtures of experts choose other experts
        for a few tokens, whose log-probabilities then differ by as much as with wrong weights.
        """
        return [
            member
            for member, k3_n in self.k3_n.items()
            if len(k3_n) > 0 and not float(k3_n.clamp(max=OUTLIER_LIMITS * limit).mean()) <= limit
        ]


def probe(
    control: ActorControl,
    members: Sequence[wire.Member],
    version: int,
    sequences: Sequence[ProbeSequence],
    of_trainer: Sequence[torch.Tensor],
) -> Measured:
    """Score ``sequences`` by each of ``members``, concurrently, and compare with the trainer's log-probabilities.

    Nothing is measured if the trainer's own log-probabilities are not finite: the weights are broken then, not the generators.

    Args:
        of_trainer: of each sequence's completion at temperature 1, float32 on the CPU.
    """
    message = wire.Probe(
        version=version,
        sequences=[s.token_ids.astype("<i4").tobytes() for s in sequences],
        prompt_tokens=[s.prompt_tokens for s in sequences],
    )
    messages = {member.member_id: message for member in members}
    calls = control.start(list(members), endpoints.WEIGHTS_PROBE, messages, PROBE_SECONDS)
    answers = calls.wait()
    trainer_n = torch.cat(list(of_trainer))
    if not bool(trainer_n.isfinite().all()):
        log.warning(
            "version %d has log-probabilities that are not finite; generators are not compared", version
        )
        return Measured({"probe_failed": 1.0}, {})
    position_n = torch.cat([torch.arange(s.prompt_tokens, len(s.token_ids)) for s in sequences])
    stats: dict[str, float] = {}
    k3: dict[str, torch.Tensor] = {}
    for member in members:
        body, problem = answers[member.member_id].body, answers[member.member_id].error
        of_generator: list[torch.Tensor] = []
        if body is not None:
            probed = msgspec.msgpack.decode(body, type=wire.Probed)
            of_generator = [
                torch.from_numpy(np.frombuffer(b, dtype="<f4").astype(np.float32)) for b in probed.logprobs
            ]
            if probed.version != version or [len(g) for g in of_generator] != [len(t) for t in of_trainer]:
                problem = "it scored another version or other sequences"
        if problem:
            log.warning("the probe of version %d on %s failed: %s", version, member.name, problem)
            continue
        generator_n = torch.cat(of_generator)
        table = ratio_table(trainer_n, generator_n, position_buckets(position_n), len(POSITIONS))
        k3[member.member_id] = k3_estimates(trainer_n, generator_n)
        stats = stats or {
            **by_position(PROBE, [RatioStatistics(*row) for row in table.tolist()]),
            "probe_max_difference": float((trainer_n - generator_n).abs().max()),
        }
    return Measured(stats or {"probe_failed": 1.0}, k3)


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probes after a publish."""

    stats: dict[str, float] = field(default_factory=dict)
    """Statistics for metrics.jsonl."""
    refused: list[str] = field(default_factory=list)
    """Ids of the members that must not generate with the version."""
    silent: list[str] = field(default_factory=list)
    """Ids of the members that did not answer, if all that did disagree: whether the weights are at fault is open, and these
    get no work with the version either."""
    problem: str = ""
    """The measured mismatch, if it is above the limit; else empty."""


class Prober:
    """Chooses which members are probed after a publish, and which of them must not generate with the version.

    Args:
        limit: ``weightSync.probeLimit``, in nats per token.
    """

    def __init__(self, control: ActorControl, limit: float) -> None:
        self._control = control
        self._limit = limit
        self._probed: set[str] = set()
        """Ids of the members that computed the same as the trainer in a probe."""
        self.agreed_version = -1
        """The newest version at which a member did, or with which other members generate."""

    def check(
        self,
        version: int,
        sequences: list[ProbeSequence],
        scores: list[torch.Tensor],
        stats: dict[str, float],
        scored_seconds: float,
        holders: list[wire.Member],
    ) -> ProbeResult:
        """Compare the log-probabilities of members that hold ``version`` with ``scores``, the trainer's.

        Probed are each member after its first weights, and one other, in turn. If all of them disagree, the other holders are
        probed too: a member that is broken by itself must not end the run. A probe without an answer is no evidence.

        Args:
            stats: measured with the scores, in ``scored_seconds``.
        """
        if not holders or not scores:
            return ProbeResult()
        begin = time.perf_counter()
        turn = holders[version % len(holders)]
        chosen = [turn, *(m for m in holders if m is not turn and m.member_id not in self._probed)]
        limit = self._limit
        measured = probe(self._control, chosen, version, sequences, scores)
        k3_n, refused = measured.k3_n, measured.above(limit)
        others = [m for m in holders if m not in chosen]
        if refused and len(refused) == len(k3_n) and others and self.agreed_version != version:
            more = probe(self._control, others, version, sequences, scores)
            k3_n, refused = k3_n | more.k3_n, [*refused, *more.above(limit)]
        agreed = k3_n.keys() - set(refused)
        if agreed:
            self._probed |= agreed
            self.agreed_version = version
        names = {m.member_id: m.name for m in holders}
        problem, silent = "", list[str]()
        if refused:
            measures = ", ".join(f"{names[m]} {float(k3_n[m].mean()):.3g}" for m in refused[:5])
            problem = (
                f"after the publish of version {version}, generators compute something else than the trainer: KL of "
                f"{measures} nats per token ({len(refused)} of {len(k3_n)} probed are above the limit of {limit:g}, "
                "weightSync.probeLimit)"
            )
            if (
                self.agreed_version != version
            ):  # all holders are probed; without a silent one, the weights are at fault
                silent = [m.member_id for m in holders if m.member_id not in k3_n]
                problem += f"; {len(silent)} did not answer" if silent else ""
            log.error("%s", problem)
        seconds = {"probe_seconds": scored_seconds + time.perf_counter() - begin}
        return ProbeResult(measured.stats | stats | seconds, refused, silent, problem)


def probe_sequences(
    shard: wire.Shard, count: int, context_tokens: int, min_tokens: int = MIN_COMPARED_TOKENS
) -> list[ProbeSequence]:
    """Up to ``count`` evenly spaced sequences of the shard, for the probe after the next publish. One with masked tokens, as an episode
    of several turns has, ends after the longest part between them, which alone is compared.

    They are shorter than ``context_tokens``: a server scores a sequence as a prompt, which leaves room for one token.
    Of all but one, beginnings suffice; fewer than ``min_tokens`` tokens to compare are no probe (:func:`_shortened`).
    """
    usable = [
        (s, *of)
        for s in shard.sequences
        if (of := _longest_sampled(s))[0] < of[1]
        if len(s.prompt_token_ids) + of[1] * _INT32.itemsize < context_tokens * _INT32.itemsize
    ]
    chosen = [usable[i * len(usable) // count] for i in range(count)] if len(usable) > count else usable
    return _shortened(
        [
            ProbeSequence(
                np.concatenate(
                    [
                        np.frombuffer(s.prompt_token_ids, dtype=_INT32),
                        np.frombuffer(s.token_ids, dtype=_INT32)[:end],
                    ]
                ),
                len(s.prompt_token_ids) // _INT32.itemsize + start,
            )
            for s, start, end in chosen
        ],
        min_tokens,
    )


def _longest_sampled(sequence: wire.Sequence) -> tuple[int, int]:
    """Start and end, in tokens of the completion, of its longest part without masked tokens."""
    longest, start, tokens = (0, 0), 0, len(sequence.token_ids) // _INT32.itemsize
    ends = [*(span.start for span in sequence.versions[1:]), tokens]
    for span, end in zip(sequence.versions, ends, strict=False):
        start = end if span.version == wire.MASKED else start
        longest = max(longest, (start, end), key=lambda part: part[1] - part[0])
    return longest


def start_sequences(shard: wire.Shard, context_tokens: int) -> list[PackedSequence]:
    """The completions that later weights are compared on with those of the start, chosen as for a probe."""
    return [one.sequence for one in probe_sequences(shard, START_SEQUENCES, context_tokens, min_tokens=1)]


def _shortened(sequences: list[ProbeSequence], min_tokens: int) -> list[ProbeSequence]:
    """The sequence with the longest completion, whole, and of the others beginnings with :data:`PROBE_TOKENS` tokens in total, in
    their order; none if fewer than ``min_tokens`` tokens would be compared.

    The whole one covers all positions, the others as many contents as possible. Shorter ones leave their part to longer ones; one
    whose prompt leaves no room for :data:`MIN_PROBED_TOKENS` of its completion is left out, unless the minimum needs it.
    """
    totals = [len(s.token_ids) for s in sequences]
    prompts = [s.prompt_tokens for s in sequences]
    if sum(totals) - sum(prompts) < min_tokens:
        return []
    whole = max(range(len(sequences)), key=lambda i: (totals[i] - prompts[i], totals[i]))
    others = sorted((i for i in range(len(sequences)) if i != whole), key=totals.__getitem__)
    left, kept, omitted = PROBE_TOKENS, {whole: totals[whole]}, list[int]()
    for rank, i in enumerate(others):
        length = min(totals[i], max(left // (len(others) - rank), prompts[i] + MIN_PROBED_TOKENS))
        if length > left:
            omitted.append(i)
            continue
        left -= length
        kept[i] = length
    missing = min_tokens - sum(length - prompts[i] for i, length in kept.items())
    for i in omitted:
        if missing <= 0:
            break
        kept[i] = min(totals[i], prompts[i] + missing)
        missing -= kept[i] - prompts[i]
    return [replace(sequences[i], token_ids=sequences[i].token_ids[: kept[i]]) for i in sorted(kept)]


def first_probes(model: Path, spec: RunSpec) -> list[ProbeSequence]:
    """Sequences of at least two tokens: the whole text, and parts of it.

    ``model`` is the folder with the tokenizer.
    """
    (ids,) = ModelTokenizer(model, PromptSpec()).encode([_TEXT])
    # A server scores a sequence as a prompt, which leaves room for one token.
    most = min(spec.model.context_tokens - 1, spec.micro_batch_tokens)
    size = -(-len(ids) // _PARTS)
    parts = [ids, *(ids[start : start + size] for start in range(0, len(ids), size))]
    sequences = [ProbeSequence(np.array(part[:most], dtype=np.int32), 1) for part in parts]
    return [s for s in sequences if len(s.token_ids) > 1]
