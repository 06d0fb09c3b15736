"""The rows of the record of rollouts: what is written of a group, and the columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalerl_api.wire import MASKED, Completion, Group, PromptRef, Split, TrainedSequence
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.journal_records import StoredCompletion, StoredGroup

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group to write."""

    step: int
    """Its step; of an evaluation the version."""
    slot: int
    prompt: PromptRef
    group: StoredGroup | Group | None
    """None of a slot that was given up."""
    lengths: Sequence[int]
    scores: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    ungraded: Sequence[int]
    rewards: Sequence[float] = ()
    """In training; empty in evaluations."""
    trained_tokens: Sequence[int] = ()
    excluded: str = ""
    """Why the whole group is not trained on; empty if it is, and in evaluations."""

    @classmethod
    def of_training(
        cls,
        step: int,
        slot: int,
        prompt: PromptRef,
        accepted: Accepted,
        group: StoredGroup | Group | None,
        skipped: bool,
    ) -> RecordedGroup:
        """A group of a closed step, which was ``skipped`` or trained."""
        excluded = "zero-variance" if accepted.filtered else "step-skipped" if skipped else ""
        return cls(
            *(step, slot, prompt, group),
            *(accepted.lengths, accepted.scores, accepted.parts, accepted.ungraded),
            rewards=accepted.rewards,
            trained_tokens=accepted.trained_tokens,
            excluded="given-up" if accepted.given_up else excluded,
        )

    @property
    def nbytes(self) -> int:
        """Approximate size in memory, with the tokens."""
        text = self.group.text if self.group is not None else None
        texts = 0 if text is None else len(text.prompt) + sum(map(len, text.completions))
        return 1024 + 12 * sum(self.lengths) + texts

    def rows(self, task: str, figures: Mapping[tuple[int, int], TrainedSequence]) -> Iterable[dict[str, Any]]:
        """One row for each completion, by column; one without a completion if the slot was given up; none of a group without
        texts, which was leased before the spec asked for them."""
        prompt, text = self.prompt, self.group.text if self.group is not None else None
        common = {
            "step": self.step,
            "split": prompt.split.value,
            "task": task,
            "prompt_index": prompt.index,
            "slot": self.slot,
            "prompt_id": self.group.prompt_id if self.group is not None else None,
            "prompt": text and text.prompt,
            "reference": text and text.reference,
            "labels": list(text.labels.items()) if text else [],
        }
        if self.group is None:
            yield common | {"sample": 0, "excluded": self.excluded, "tokens": 0, "parts": []}
            return
        if text is None:
            return
        held_out = prompt.split is Split.HELD_OUT
        completions: Sequence[StoredCompletion | Completion] = self.group.completions
        for at, completion in enumerate(completions):
            versions = [span.version for span in completion.versions if span.version != MASKED]
            oldest, newest = min(versions, default=None), max(versions, default=None)
            excluded = self.excluded or ("ungraded" if at in self.ungraded else "")
            if not (excluded or held_out or self.trained_tokens[at]):
                excluded = "masked"
            figure = figures.get((self.slot, at))
            yield common | {
                "sample": at,
                "completion": text.completions[at],
                "reward": None if at in self.ungraded else self.scores[at],
                "training_reward": self.rewards[at] if self.rewards else None,
                "parts": []
                if at in self.ungraded
                else [(name, each[at]) for name, each in self.parts.items()],
                "error": self.group.verdicts.errors.get(at),
                "excluded": excluded or None,
                "tokens": self.lengths[at],
                "turns": len(completion.turns) + 1,
                "finish_reason": completion.finish_reason,
                "oldest_version": oldest,
                "newest_version": newest,
                "age": None if held_out or oldest is None else max(0, self.step - oldest),
                "advantage": figure and figure.advantage,
                "logprob_difference_mean": figure and figure.mean_difference,
                "logprob_difference_max": figure and figure.max_difference,
                **_by_token(completion, text.token_characters[at : at + 1], figure),
            }


def _by_token(
    completion: StoredCompletion | Completion, characters: Sequence[bytes], figure: TrainedSequence | None
) -> dict[str, Any]:
    """The columns with an item for each token of a completion; without those that are not known."""
    import numpy as np

    spans, tokens = completion.versions, len(completion.token_ids) // 4
    versions = np.empty(tokens if spans else 0, dtype=np.int32)
    for span in spans:
        versions[span.start :] = span.version
    columns: dict[str, Any] = {"token_versions": versions}
    lengths = np.frombuffer(b"".join(characters), dtype="<u2")
    if len(lengths) == tokens:
        columns["token_ends"] = lengths.cumsum(dtype=np.int32)
    own = np.frombuffer(b"" if figure is None else figure.differences, dtype="<f2")
    trained = versions != MASKED if any(span.version == MASKED for span in spans) else slice(None)
    if len(own) and len(own) == len(versions[trained]):
        differences = np.full(tokens, np.nan, dtype=np.float32)
        differences[trained] = own
        columns["token_logprob_differences"] = differences
    return columns


def schema() -> pa.Schema:
    """The columns of the files; ``docs/reference/rollouts.md`` describes them."""
    import pyarrow as pa

    return pa.schema(
        [
            ("step", pa.int32()),
            ("split", pa.string()),
            ("task", pa.string()),
            ("prompt_index", pa.int64()),
            ("prompt_id", pa.string()),
            ("slot", pa.int64()),
            ("sample", pa.int32()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("reference", pa.string()),
            ("labels", pa.map_(pa.string(), pa.string())),
            ("reward", pa.float64()),
            ("training_reward", pa.float64()),
            ("parts", pa.map_(pa.string(), pa.float64())),
            ("error", pa.string()),
            ("excluded", pa.string()),
            ("advantage", pa.float64()),
            ("tokens", pa.int32()),
            ("turns", pa.int32()),
            ("finish_reason", pa.string()),
            ("oldest_version", pa.int32()),
            ("newest_version", pa.int32()),
            ("age", pa.int32()),
            ("logprob_difference_mean", pa.float64()),
            ("logprob_difference_max", pa.float64()),
            ("token_ends", pa.list_(pa.int32())),
            ("token_versions", pa.list_(pa.int32())),
            ("token_logprob_differences", pa.list_(pa.float32())),
        ]
    )


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    columns = schema()
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in columns]
    return pa.Table.from_arrays(arrays, schema=columns)
