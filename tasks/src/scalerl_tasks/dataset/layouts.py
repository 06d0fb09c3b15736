"""Layouts of public data sets, recognized by the columns and the first values of each.

Each row of :data:`LAYOUTS` has the columns that it needs, where the fields of a problem are, and the pattern of the answer. The
first that fits is taken, so the more specific ones come first. What the spec says counts more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalerl_tasks.dataset.expressions import names
from scalerl_tasks.errors import SourceError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """A known layout."""

    name: str
    needs: tuple[str, ...]
    """Columns that the first row has."""
    columns: Mapping[str, str]
    """Expression by field."""
    pattern: str | None = None
    """As ``answerPattern``."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Expression by label; only those whose column the first row has."""
    fits: Callable[[Row], bool] = lambda row: True
    """Whether the values of the first row fit too."""
    leaves_out: tuple[str, ...] = ()
    """Large columns that are not kept as metadata."""
    programs: bool = False
    """The answer is the tests of a program."""


def _ground_truth(row: Row) -> Any:
    model = row["reward_model"]
    if isinstance(model, str):
        try:
            model = json.loads(model)
        except ValueError:
            return None
    return model.get("ground_truth") if isinstance(model, dict) else None


def _is_listed(row: Row) -> bool:
    """Whether the ground truth is a JSON list with one text, as in Skywork-OR1."""
    truth = _ground_truth(row)
    if not isinstance(truth, str) or not truth.startswith("["):
        return False
    try:
        items = json.loads(truth)
    except ValueError:
        return False
    return isinstance(items, list) and len(items) == 1 and isinstance(items[0], str | int | float)


def _has_messages(row: Row) -> bool:
    return isinstance(row["messages"], list)


def _ends_with_assistant(row: Row) -> bool:
    messages = row["messages"]
    return bool(
        _has_messages(row)
        and messages
        and isinstance(messages[-1], dict)
        and messages[-1].get("role") == "assistant"
    )


_VERL = {"prompt": "prompt", "answer": "reward_model.ground_truth"}
_VERL_LABELS = {"data_source": "data_source"}
_TESTS = "json(tests)"

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "Skywork-OR1",
        ("prompt", "reward_model"),
        {**_VERL, "answer": "reward_model.ground_truth[0]"},
        labels=_VERL_LABELS,
        fits=_is_listed,
    ),
    Layout(
        "verl (DAPO-Math and others)",
        ("prompt", "reward_model"),
        _VERL,
        labels=_VERL_LABELS,
        fits=lambda row: _ground_truth(row) is not None and not isinstance(_ground_truth(row), dict | list),
    ),
    Layout(
        "verl, with a structure as the ground truth",
        ("prompt", "reward_model"),
        {**_VERL, "answer": "json(reward_model.ground_truth)"},
        labels=_VERL_LABELS,
        fits=lambda row: _ground_truth(row) is not None,
    ),
    Layout(
        "HumanEval",
        ("prompt", "test", "entry_point"),
        {"prompt": "prompt", "answer": "test", "solution": "canonical_solution"},
        programs=True,
    ),
    Layout(
        "MBPP",
        ("text", "test_list"),
        {"prompt": "text", "answer": "json(test_list)", "solution": "code"},
        programs=True,
    ),
    Layout(
        "MBPP, sanitized",
        ("prompt", "test_list"),
        {"prompt": "prompt", "answer": "json(test_list)", "solution": "code"},
        programs=True,
    ),
    Layout(
        "LiveCodeBench",
        ("question_content", "public_test_cases"),
        {"prompt": "question_content", "answer": "json(public_test_cases)"},
        labels={"difficulty": "difficulty", "platform": "platform"},
        programs=True,
    ),
    Layout(
        "APPS or TACO",
        ("question", "input_output"),
        {"prompt": "question", "answer": "json(input_output)", "solution": "solutions[0]"},
        labels={"difficulty": "difficulty"},
        leaves_out=("solutions",),
        programs=True,
    ),
    Layout(
        "KodCode",
        ("question", "test"),
        {"prompt": "question", "answer": "test", "solution": "solution"},
        programs=True,
    ),
    Layout(
        "DeepCoder",
        ("problem", "tests"),
        {"prompt": "problem", "answer": _TESTS, "solution": "solutions[0]"},
        leaves_out=("solutions",),
        programs=True,
    ),
    Layout(
        "GSM8K",
        ("question", "answer"),
        {"prompt": "question", "answer": "answer", "solution": "answer"},
        "Hashes",
        fits=lambda row: isinstance(row["answer"], str) and "####" in row["answer"],
    ),
    Layout(
        "OpenR1-Math",
        ("problem", "answer", "generations"),
        {"prompt": "problem", "answer": "answer", "solution": "solution"},
        labels={"source": "source", "problem_type": "problem_type"},
        leaves_out=("generations", "messages"),
    ),
    Layout(
        "Polaris",
        ("problem", "answer", "difficulty"),
        {"prompt": "problem", "answer": "answer", "difficulty": "1 - number(difficulty)"},
        labels={"solved": "difficulty"},
        fits=lambda row: isinstance(row["difficulty"], str) and "/" in row["difficulty"],
    ),
    Layout(
        "Big-Math",
        ("problem", "answer", "llama8b_solve_rate"),
        {"prompt": "problem", "answer": "answer", "difficulty": "1 - llama8b_solve_rate"},
        labels={"source": "source"},
    ),
    Layout(
        "Big-Math",
        ("prompt", "answer", "llama8b_solve_rate"),
        {"prompt": "prompt", "answer": "answer", "difficulty": "1 - llama8b_solve_rate"},
        labels={"source": "source"},
    ),
    Layout(
        "DeepScaleR or NuminaMath",
        ("problem", "answer"),
        {"prompt": "problem", "answer": "answer", "solution": "solution"},
        labels={"source": "source"},
    ),
    Layout(
        "MATH",
        ("problem", "solution"),
        {"prompt": "problem", "answer": "solution", "solution": "solution", "difficulty": "number(level)"},
        "Boxed",
        labels={"level": "level", "type": "type"},
        fits=lambda row: isinstance(row["solution"], str) and "\\boxed" in row["solution"],
    ),
    Layout(
        "prompt and answer",
        ("prompt", "answer"),
        {
            "prompt": "prompt",
            "answer": "answer",
            "id": "id",
            "difficulty": "difficulty",
            "solution": "solution",
            "system": "system",
        },
    ),
    Layout(
        "question and answer",
        ("question", "answer"),
        {"prompt": "question", "answer": "answer", "solution": "solution"},
    ),
    Layout(
        "prompt and ground_truth", ("prompt", "ground_truth"), {"prompt": "prompt", "answer": "ground_truth"}
    ),
    Layout(
        "prompt and solution",
        ("prompt", "solution"),
        {"prompt": "prompt", "answer": "solution", "solution": "solution"},
    ),
    Layout(
        "messages and answer",
        ("messages", "answer"),
        {"prompt": "messages", "answer": "answer", "solution": "solution"},
        fits=_has_messages,
    ),
    Layout(
        "messages that end with the assistant's answer",
        ("messages",),
        {"prompt": "messages", "answer": "messages[-1].content", "solution": "messages[-1].content"},
        fits=_ends_with_assistant,
    ),
    Layout(
        "prompts without answers",
        ("prompt",),
        {"prompt": "prompt", "id": "id", "difficulty": "difficulty", "system": "system"},
    ),
    Layout("messages without answers", ("messages",), {"prompt": "messages"}, fits=_has_messages),
)


def recognize(row: Row) -> Layout | None:
    """The layout of a data set with this first row; None if it is none of :data:`LAYOUTS`."""
    for layout in LAYOUTS:
        if all(row.get(name) is not None for name in layout.needs) and layout.fits(row):
            return layout
    return None


def unknown_layout(columns: Collection[str], missing: Sequence[str]) -> SourceError:
    """The error of columns that are no known layout, where the spec does not say where ``missing`` fields are."""
    return SourceError(
        f"the columns are no known layout: {names(columns)}; say where {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}, such as "
        f"columns: {{{', '.join(f'{name}: COLUMN' for name in missing)}}} (paths such as a.b and a[0].b too)"
    )
