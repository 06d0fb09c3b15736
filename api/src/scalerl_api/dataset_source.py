"""``task.dataset``: public data, by files or from a hub, with columns and filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from scalerl_api.fields import DecimalString, Matches, Model, exactly_one
from scalerl_api.source_kind import SourceKind


class HubDataset(Model):
    """A data set on the Hugging Face Hub; its files are read as they are, no code of the repository runs."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=200),
        AfterValidator(
            Matches(r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$", "must be owner/data set, as the hub lists it")
        ),
    ]
    """``owner/data-set``, as on the hub."""
    config: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Configuration (subset) of the data set; needed if it has several and none is the default."""
    split: Annotated[str, Field(min_length=1, max_length=200)] = "train"
    """Split of the data set."""
    revision: Annotated[str, Field(min_length=1, max_length=200)] = "main"
    """Branch, tag or commit. The preparation resolves it to a commit, which the run keeps."""


Expression = Annotated[str, Field(min_length=1, max_length=1000)]
"""A column, a path into one (``reward_model.ground_truth``, ``messages[0].content``), or an expression."""


class ColumnsSpec(Model):
    """Where the fields of a problem are in a row: a column, a path into it, or an expression."""

    prompt: Expression | None = None
    """The user's text, or a list of messages with ``role`` and ``content``."""
    answer: Expression | None = None
    """The reference answer: text or a number."""
    id: Expression | None = None
    """Text or an integer that is unique; default: a hash of prompt and answer."""
    difficulty: Expression | None = None
    """A number, higher is harder, such as ``1 - solve_rate`` or ``1 - number(difficulty)``."""
    solution: Expression | None = None
    """A worked solution for the supervised warm start."""
    system: Expression | None = None
    """The system message; needs ``prompt.format: Chat``."""
    labels: Annotated[dict[Annotated[str, Field(max_length=63)], Expression], Field(max_length=16)] = {}
    """Values by which results are broken down, by the label's name."""


ShareDecimal = Annotated[
    DecimalString,
    AfterValidator(
        Matches(
            r"^(0(\.[0-9]{1,9})?|1(\.0{1,9})?)$",
            'must be a share from 0 to 1 like "0.25", with nine digits after the point at most',
        )
    ),
]
"""A share from 0 to 1. Shares are compared and summed exactly, so the number of digits is limited."""


class DatasetFilterSpec(Model):
    """Rows that are left out, beside those with the prompt of an earlier row; the preparation counts them by reason."""

    where: Annotated[list[Expression], Field(max_length=32)] = []
    """Expressions that must all be true for a row, such as ``difficulty > 0.2`` or ``len(prompt) < 4000``. A row without a
    value to compare is left out."""
    max_rejected: ShareDecimal = "0.05"
    """Maximum share of rows whose reference answer, as a reply, does not score 1 by the verifier. They are left out; a run with more
    of them is refused."""
    overlap: Annotated[int, Field(ge=4, le=100)] | None = None
    """Training rows that share as many consecutive words with a held-out prompt, or with one of an evaluation set, are left out, such
    as 13; default: only those with the same text."""


class DatasetSource(SourceKind):
    """Problems in files of any layout, read once by the preparation into a file of the run's directory."""

    is_table = True
    prompts_checked = 100_000
    answers_checked = 20_000

    files: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)
        ]
        | None
    ) = None
    """Paths or globs of ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet`` and ``.arrow`` files, also compressed (``.gz``,
    ``.xz``, ``.bz2``, ``.zst``); on one machine relative to the run file, on a cluster absolute, on a mounted volume. A glob's
    files are sorted by name."""
    hub: HubDataset | None = None
    """A data set on a hub, downloaded before the run starts; give this or files."""
    columns: ColumnsSpec = ColumnsSpec()
    """Where the fields of a problem are; default: by the layout that the columns are recognized as."""
    answer_pattern: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Where the answer is in the answer's text: ``Hashes`` (after the last ``####``), ``Boxed`` (in the last ``\\boxed{}``), or a
    regular expression with one group, of which the last match counts."""
    metadata: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)] | None
    ) = None
    """Columns that are kept beside the fields; default: all that are not mapped."""
    filter: DatasetFilterSpec = DatasetFilterSpec()
    """Rows that are left out."""

    rules = (exactly_one("files", "hub"),)

    @property
    def paths(self) -> Mapping[str, str]:
        return {f"files[{at}]": path for at, path in enumerate(self.files or ())}

    @property
    def uses_hub(self) -> bool:
        return self.hub is not None
