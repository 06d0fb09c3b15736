"""A reasoning-gym task: its prompts, which are not stored but generated from seed and index at each read, and its scorer."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import threading
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from scalerl_tasks.answers.extraction import extract_answer
from scalerl_tasks.answers.verifiers import shown
from scalerl_tasks.errors import ParameterError, PromptError, SourceError, VerifierError, did_you_mean
from scalerl_tasks.gym_loader import load_task_classes
from scalerl_tasks.prompts import Prompt, check_index
from scalerl_tasks.verdict import NO_ANSWER

if TYPE_CHECKING:
    from scalerl_api.source import ProblemSpec

# Not parameters of a task here, because every task has them and a run sets them separately.
_RESERVED = ("seed", "size")
_SAMPLES = 3
"""Prompts with which the scorer is tested before use."""


@dataclass(frozen=True, slots=True)
class GymTask:
    """A reasoning-gym task, by name and parameters, and the selection of its prompts, by seed and number.

    Most tasks seed prompt i with ``seed + i``, so two seeds that differ by less than ``size`` give partly the same prompts.
    Held-out prompts come from :func:`scalerl_tasks.split_held_out`, never from a second seed.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    size: int = 50_000

    def create(self) -> Any:
        """The library's data set object. Parameters given as text are converted to the task's types (``"0.5"`` to a float).

        Raises:
            UnknownTaskError: no task of this name; the message lists similar names.
            ParameterError: a parameter is unknown, of a wrong type or out of range; the message lists the allowed ones.
        """
        data_class, config_class = load_task_classes(self.name)
        values = _checked(self.name, self.parameters, config_class)
        if self.size < 1:
            raise ParameterError(
                f"reasoning-gym task {self.name!r}: size is {self.size}, must be positive", "size"
            )
        try:
            config = config_class(**values, seed=self.seed, size=self.size)
            if hasattr(config, "validate"):
                config.validate()
            return data_class(config)
        except Exception as error:  # AssertionError, ValueError, KeyError: tasks differ
            raise _parameter_error(self.name, self.parameters, error) from error


class ReasoningGymSource:
    """A :class:`~scalerl_tasks.PromptSource` of one reasoning-gym task; its memory does not depend on the number of prompts.

    Raises:
        UnknownTaskError, ParameterError: see :meth:`GymTask.create`.
        SourceError: the task cannot be imported or is not reproducible.
    """

    def __init__(self, task: GymTask) -> None:
        self.task = task
        self._data = task.create()
        self._lock = threading.Lock()
        identity = {
            "kind": "reasoning-gym",
            # A new release may generate other prompts from the same seed.
            "release": importlib.metadata.version("reasoning-gym"),
            "name": task.name,
            "config": dataclasses.asdict(self._data.config),
        }
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=repr).encode()).hexdigest()
        self._check_reproducible()

    def __len__(self) -> int:
        return self.task.size

    def __getitem__(self, index: int, /) -> Prompt:
        check_index(index, self.task.size)
        with self._lock:  # a few tasks keep temporary state on the object
            try:
                entry = self._data[index]
            except Exception as error:
                raise PromptError(
                    f"reasoning-gym task {self.task.name!r} failed to generate prompt {index}: "
                    f"{type(error).__name__}: {error}; other parameters may help"
                ) from error
        metadata: dict[str, Any] = entry["metadata"]
        operations = arithmetic_operations(metadata)
        return Prompt(
            id=f"{self.task.name}/{self.digest[:12]}/{index}",
            text=entry["question"],
            # Some tasks accept any solution of the puzzle, and have no reference answer.
            answer=entry["answer"] or "",
            difficulty=None if operations is None else float(operations),
            metadata=metadata,
        )

    def difficulty(self, index: int, /) -> float | None:
        return self[index].difficulty

    def _check_reproducible(self) -> None:
        """Generate the first prompt twice, to detect invalid parameters and tasks that ignore their seed."""
        try:
            first, again = self[0], self[0]
        except SourceError as error:
            raise _parameter_error(self.task.name, self.task.parameters, error.__cause__ or error) from error
        if first.text != again.text or first.answer != again.answer:
            raise SourceError(
                f"reasoning-gym task {self.task.name!r} gives a different prompt at each read, whatever its seed: "
                f"a run could not be resumed or its evaluation repeated; use another task"
            )


def arithmetic_operations(metadata: Mapping[str, Any]) -> int | None:
    """Number of operations that the answer needs: op(G), the difficulty of the Interplay paper (arXiv 2512.07783, §3) [P].

    It is known for reasoning-gym tasks that provide the number of terms of an expression (``chain_sum``,
    ``basic_arithmetic``, ``products``, ``decimal_chain_sum``, …): a chain of n terms has n − 1 operations. For all other
    tasks the result is None.

    >>> arithmetic_operations({"num_terms": 4})
    3
    >>> arithmetic_operations({"grid": "..."}) is None
    True
    """
    terms = metadata.get("num_terms")
    if isinstance(terms, int) and not isinstance(terms, bool) and terms >= 1:
        return terms - 1
    return None


def _checked(task: str, parameters: Mapping[str, Any], config_class: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    allowed = {f.name for f in dataclasses.fields(config_class)} - set(_RESERVED)
    values = {}
    for name, value in parameters.items():
        if name in _RESERVED:
            raise ParameterError(
                f"reasoning-gym task {task!r}: {name!r} belongs beside the parameters, not among them", name
            )
        if name not in allowed:
            raise ParameterError(
                f"reasoning-gym task {task!r} has no parameter {name!r}{did_you_mean(name, allowed)} "
                f"(allowed: {', '.join(sorted(allowed)) or 'none'})",
                name,
            )
        values[name] = _converted(task, name, value, hints.get(name, Any))
    return values


def _converted(task: str, name: str, value: Any, hint: Any) -> Any:
    try:
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return msgspec.convert(value, hint, strict=isinstance(value, bool | int | float))
    except msgspec.ValidationError as error:
        raise ParameterError(
            f"reasoning-gym task {task!r}, parameter {name!r}: {str(error).lower()}; given {value!r}", name
        ) from error
    except TypeError:
        # msgspec does not support the type: only the task's own validation checks it.
        return value


def _parameter_error(task: str, parameters: Mapping[str, Any], error: BaseException) -> ParameterError:
    reason = str(error) or "a check without a message failed"
    named = next((name for name in parameters if name in reason), None)
    given = ", ".join(f"{name}={value!r}" for name, value in parameters.items()) or "none"
    where = "" if named is None else f", parameter {named!r}"
    return ParameterError(
        f"reasoning-gym task {task!r}{where}: {type(error).__name__}: {reason} (parameters given: {given})",
        named,
    )


def gym_task(spec: ProblemSpec) -> GymTask | None:
    """The Reasoning Gym task of a section; None of another source."""
    section = spec.reasoning_gym
    if section is None:
        return None
    return GymTask(section.name, section.parameters, section.seed, section.size)


class ReasoningGymVerifier:
    """The task's own scorer, with its own partial credit.

    The scorer that most tasks share scores a wrong answer that contains the right one with len(right)/len(given), and many
    scorers give 0.01 for any answer. ``exact`` and ``number`` score only the correct answer.
    """

    name = "reasoning-gym"
    finds_answers = True

    def __init__(self, task: GymTask) -> None:
        self._task = task
        self._data = task.create()

    def score(self, prompt: Prompt, completion: str, /) -> float:
        answer = extract_answer(completion)
        if not answer:
            return NO_ANSWER
        entry = {
            "question": prompt.text,
            "answer": prompt.answer or None,
            "metadata": dict(prompt.metadata),
        }
        score = float(self._data.score_answer(answer, entry))
        if not math.isfinite(score):
            raise ValueError(f"the scorer of {self._task.name!r} gave {score}")
        return min(1.0, max(0.0, score))

    def check(self, prompt: Prompt, /) -> None:
        if prompt.answer and not self.score(prompt, prompt.answer) > 0:
            raise VerifierError(
                f"prompt {prompt.id}: the scorer of {self._task.name!r} gives its own answer {shown(prompt.answer)} no score; "
                "use another verifier or task"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        source = ReasoningGymSource(self._task)
        prompts = [source[index] for index in range(min(_SAMPLES, len(source)))]
        return [(prompt, prompt.answer) for prompt in prompts if prompt.answer]
