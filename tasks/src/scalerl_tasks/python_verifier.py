"""``verifier.python``: a function of the user as a verifier, called as in verl, as in TRL, or as here.

=========  =======================================================================  ==================================
signature  arguments, by name                                                       result
=========  =======================================================================  ==================================
score      prompt, completion, answer, metadata                                     a reward
group      prompt, completions, answer, metadata                                    a list of rewards
verl       data_source, solution_str, ground_truth, extra_info;                     a reward;
           or data_sources, solution_strs, ground_truths, extra_infos               or a list of rewards
trl        prompts, completions, and each column of the row as a list               a list of rewards
=========  =======================================================================  ==================================

A reward is a number, a bool, a :class:`~scalerl_tasks.Verdict`, a dict with ``score``, or None where the function does not apply.
Arguments that the function does not take are left out. Coroutine functions are awaited, those of one completion for all of a
group at once.

The function is trusted: it may start processes, write files and use the network. Completions are not, and no
guard keeps the function from running them. Time and memory are limited as for any verifier.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scalerl_tasks.errors import VerifierError, did_you_mean
from scalerl_tasks.prompts import Prompt, render_prompt
from scalerl_tasks.python_function import PythonFunction, described, imported
from scalerl_tasks.verdict import Verdict, as_verdict, declared_parts

Reward = Verdict | float | None | VerifierError
"""What a function gave for a completion: None where it does not apply, an error where it failed."""
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "score": frozenset({"prompt", "completion", "answer", "metadata"}),
    "group": frozenset({"prompt", "completions", "answer", "metadata"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "verl batch": frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"}),
}
"""Arguments by signature; TRL's depend on the columns."""
_TOKEN_IDS = ("completion_ids", "completions_ids", "prompt_ids", "prompts_ids")
"""Arguments of TRL that functions do not get here."""
_NOT_COPIED = frozenset({str, int, float, bool, tuple, type(None)})
_MAX_SHOWN = 80


class PythonVerifier:
    """A function as a verifier.

    Raises:
        VerifierError: there is no such file, module or function, importing it fails, or it needs other arguments.
    """

    name = "python"
    trusted = True
    """The grader has no audit guard, and may start processes and write files."""

    def __init__(self, given: PythonFunction) -> None:
        self._given = given
        self.range, self.label = given.range, given.label
        self._module = imported(given)
        function = getattr(self._module, given.function, None)
        if not callable(function):
            known = [n for n, v in vars(self._module).items() if callable(v) and not n.startswith("_")]
            raise VerifierError(
                f"{given.label}: {given.path or given.module} has no function {given.function!r}"
                f"{did_you_mean(given.function, known)} (functions: {', '.join(known[:20]) or 'none'}); correct "
                "verifier.python.function"
            )
        self._function: Callable[..., Any] = function
        self.part_names: Sequence[str] = getattr(function, "part_names", ())
        self._takes, self._required, self._takes_all = _parameters(function)
        self._form = given.signature
        if self._form == "verl" and "solution_strs" in self._takes:
            self._form = "verl batch"
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an asynchronous __call__
        )
        self._of_a_group = self._form in ("group", "trl", "verl batch")
        self.whole = self._of_a_group or self._is_async
        """Whether completions are scored a group at a time, by :meth:`score_group`."""
        self._parameters = self._checked_parameters()
        own = _ARGUMENTS.get(self._form, frozenset())
        self._left_out = [] if self._takes_all else [name for name in own if name not in self._takes]
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, prompt: Prompt, completion: str, /) -> Verdict | float | None:
        """The reward of a completion.

        Raises:
            VerifierError: the function failed, or what it gave is no reward.
        """
        if self.whole:
            (found,) = self.score_group(prompt, [completion])
            if isinstance(found, VerifierError):
                raise found
            return found
        arguments = self._chosen(prompt, self._of_one(prompt, completion))
        try:
            found = self._function(**arguments)
            if type(found) is float:
                return found
            if inspect.isawaitable(found):
                found = self._run(found)
        except MemoryError:
            raise
        except BaseException as error:  # SystemExit included
            raise self._failed(prompt, error) from None
        return self._reward(prompt, found)

    def score_group(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward]:
        """The reward, or the error, of each completion of a group."""
        if not self._of_a_group:
            gathered: list[Reward] = self._run(self._gathered(prompt, completions))
            return gathered
        try:
            found = self._function(**self._chosen(prompt, self._of_many(prompt, completions)))
            if inspect.isawaitable(found):
                found = self._run(found)
        except (MemoryError, VerifierError):
            raise
        except BaseException as error:
            raise self._failed(prompt, error) from None
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__"):
            raise VerifierError(
                f"{self._given.label} returned {_shown(found)} for {len(completions)} completions of the prompt {prompt.id}; return "
                "a list with one reward each"
            )
        if len(found) != len(completions):
            raise VerifierError(
                f"{self._given.label} returned {len(found)} rewards for {len(completions)} completions of the prompt {prompt.id}; "
                "return one each"
            )
        return [self._reward_or_error(prompt, one) for one in found]

    def check(self, prompt: Prompt, /) -> None:
        """Check that the function gives a reward to the reference answer as a reply."""
        reward = self.score(prompt, prompt.answer)
        if reward is None:
            return
        try:
            as_verdict(reward, declared_parts(self), self.range)
        except (ArithmeticError, TypeError, ValueError) as error:
            text = str(error).replace("the verifier", self.label, 1)
            raise VerifierError(
                f"{text} for the prompt {prompt.id}; set verifier.range to what it gives"
            ) from None

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        return []

    # --- arguments ------------------------------------------------------------------------------

    def _of_one(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        if self._form == "verl":
            source, truth, extra = _verl_row(prompt)
            return {
                "data_source": source,
                "solution_str": completion,
                "ground_truth": truth,
                "extra_info": extra,
            }
        return {
            "prompt": prompt.text,
            "completion": completion,
            "answer": prompt.answer,
            "metadata": None if "metadata" in self._left_out else _copied(prompt.metadata),
        }

    def _of_many(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, Any]:
        count = len(completions)
        if self._form == "group":
            return {
                "prompt": prompt.text,
                "completions": list(completions),
                "answer": prompt.answer,
                "metadata": _copied(prompt.metadata),
            }
        if self._form == "verl batch":
            rows = [_verl_row(prompt) for _ in completions]
            return {
                "data_sources": [source for source, _, _ in rows],
                "solution_strs": list(completions),
                "ground_truths": [truth for _, truth, _ in rows],
                "extra_infos": [extra for _, _, extra in rows],
            }
        given: dict[str, Any] = {
            name: [_copied(value) for _ in completions]
            for name, value in _columns(prompt).items()
            if self._takes_all or name in self._takes
        }
        rendered = render_prompt(prompt, self._given.template, self._given.system)
        if self._given.chat:
            given["prompts"] = [rendered.messages for _ in completions]
            given["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
        else:
            given["prompts"], given["completions"] = [rendered.user] * count, list(completions)
        return given | {"trainer_state": None, "log_extra": _ignored, "log_metric": _ignored}

    def _chosen(self, prompt: Prompt, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the function takes, with its parameters.

        Raises:
            VerifierError: TRL: the row lacks a column that it needs.
        """
        given |= self._parameters
        if self._form != "trl":  # checked when it was opened
            for name in self._left_out:
                del given[name]
            return given
        if missing := self._required - given.keys():
            name, known = min(missing), sorted(_columns(prompt))
            raise VerifierError(
                f"{self._given.label} needs {name}, but functions get texts, not token ids: use recipe.length, or the length of the text"
                if name in _TOKEN_IDS
                else f"{self._given.label} needs the column {name!r}, which the prompt {prompt.id} does not have (it has "
                f"{', '.join(known)[:200]}); keep it by dataset.metadata, or give it in verifier.python.parameters"
            )
        if self._takes_all:
            return given
        return {name: value for name, value in given.items() if name in self._takes}

    def _checked_parameters(self) -> dict[str, Any]:
        """The parameters, with decimals in texts as numbers where the function has a number.

        Raises:
            VerifierError: the function does not take one, or needs arguments that the signature does not have.
        """
        found: dict[str, Any] = {}
        own = _ARGUMENTS.get(self._form, frozenset({"prompts", "completions"}))
        where = f"{self._given.label}, signature {self._given.signature}"
        parameters = inspect.signature(self._function).parameters
        for name, value in self._given.parameters.items():
            if name in own or not (self._takes_all or name in self._takes):
                what = "is an argument of the signature" if name in own else "is no argument of the function"
                raise VerifierError(
                    f"{where}: verifier.python.parameters.{name} {what} (it takes {', '.join(self._takes)})"
                )
            parameter = parameters.get(name)
            is_number = parameter is not None and (
                isinstance(parameter.default, float) or parameter.annotation in (float, "float")
            )
            if isinstance(value, str) and is_number:
                try:
                    value = float(value)
                except ValueError:
                    raise VerifierError(
                        f"{where}: verifier.python.parameters.{name} is {value!r}, not a number"
                    ) from None
            found[name] = value
        missing = self._required - found.keys() - own
        if missing and self._form != "trl":
            raise VerifierError(
                f"{where}: the function needs {', '.join(sorted(missing))}; this signature gives {', '.join(sorted(own))}: choose "
                "another signature, or give it in verifier.python.parameters"
            )
        return found

    # --- results --------------------------------------------------------------------------------

    def _reward_or_error(self, prompt: Prompt, found: Any) -> Reward:
        try:
            return self._reward(prompt, found)
        except VerifierError as error:
            return error

    def _reward(self, prompt: Prompt, found: Any) -> Verdict | float | None:
        if found is None or isinstance(found, Verdict):
            return found
        if isinstance(found, Mapping):
            if "score" not in found:
                raise self._wrong(prompt, found, "a dict needs the key 'score'")
            parts = {name: found[name] for name in self.part_names if name in found}
            score = found["score"]
            if score is None:
                return None
            return Verdict(self._number(prompt, score), parts)
        return self._number(prompt, found)

    def _number(self, prompt: Prompt, found: Any) -> float:
        if not (hasattr(type(found), "__float__") or hasattr(type(found), "__index__")):
            raise self._wrong(prompt, found, "return a number, or None where the function does not apply")
        try:
            return float(found)
        except (ArithmeticError, TypeError, ValueError) as error:  # an array of several numbers, a huge int
            raise self._wrong(prompt, found, f"not a number: {error}") from None

    def _wrong(self, prompt: Prompt, found: Any, advice: str) -> VerifierError:
        return VerifierError(
            f"{self._given.label} returned {_shown(found)} for the prompt {prompt.id}; {advice}"
        )

    def _failed(self, prompt: Prompt, error: BaseException) -> VerifierError:
        text = f"{self._given.label} raised {described(error, self._file)} for the prompt {prompt.id}"
        if self._form == "trl" and isinstance(error, TypeError | AttributeError):
            kinds = ("Chat", "messages", "Raw", "texts")
            given, kind, other, else_kind = kinds if self._given.chat else kinds[2:] + kinds[:2]
            text += (
                f"; with prompt.format: {given}, prompts and completions are {kind}, with {other} {else_kind}"
            )
        return VerifierError(text)

    @property
    def _file(self) -> str | None:
        return getattr(self._module, "__file__", None)

    # --- coroutines -----------------------------------------------------------------------------

    def _run(self, awaitable: Any) -> Any:
        if self._loop is None:  # in the grader, since a loop does not survive a fork
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(awaitable)

    async def _gathered(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward]:
        async def one(completion: str) -> Reward:
            try:
                found = await self._function(**self._chosen(prompt, self._of_one(prompt, completion)))
            except (MemoryError, VerifierError):
                raise
            except BaseException as error:
                return self._failed(prompt, error)
            return self._reward_or_error(prompt, found)

        return list(await asyncio.gather(*map(one, completions)))


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, None], set[str], bool]:
    """Names that a function takes by keyword, those without a default, and whether it takes any."""
    takes: dict[str, None] = {}
    required: set[str] = set()
    takes_all = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            takes[parameter.name] = None
            if parameter.default is parameter.empty:
                required.add(parameter.name)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise VerifierError(
                f"{getattr(function, '__name__', function)} takes arguments without a name; it is called by name: leave the / out"
            )
    return takes, required, takes_all


def _verl_row(prompt: Prompt) -> tuple[str, Any, dict[str, Any]]:
    """``data_source``, ``ground_truth`` and ``extra_info`` of a row, as verl has them."""
    metadata = prompt.metadata
    source = metadata.get("data_source", prompt.labels.get("data_source", ""))
    model, extra = metadata.get("reward_model"), metadata.get("extra_info")
    truth = model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else prompt.answer
    return source, _copied(truth), dict(_copied(extra)) if isinstance(extra, Mapping) else {}


def _columns(prompt: Prompt) -> dict[str, Any]:
    """What functions of TRL get of a row. A solution that it does not have is a missing column, not None."""
    solution = {} if prompt.solution is None else {"solution": prompt.solution}
    return {"answer": prompt.answer, **solution, **prompt.labels, **prompt.metadata}


def _copied(value: Any) -> Any:
    """A copy of JSON data, so that a function that changes it changes nothing else."""
    # Types are compared first, and before the recursive calls: isinstance with Mapping takes longer than the rest.
    kind = type(value)
    if kind in _NOT_COPIED:
        return value
    if kind is list or isinstance(value, list):
        return [item if type(item) in _NOT_COPIED else _copied(item) for item in value]
    if kind is dict or isinstance(value, Mapping):
        return {key: item if type(item) in _NOT_COPIED else _copied(item) for key, item in value.items()}
    return value


def _ignored(*_: object, **__: object) -> None:
    """TRL's ``log_extra`` and ``log_metric``."""


def _shown(found: Any) -> str:
    try:
        text = repr(found)
    except BaseException:
        text = "a value"
    kind = "text" if isinstance(found, str) else type(found).__name__
    return f"{text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '…'} ({kind})"
