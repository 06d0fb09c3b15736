"""``spec.evaluation``: when versions are evaluated, and on which sets of problems."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from scalerl_api.fields import Model, NonNegativeDecimal, Rule, Unique, at_most_one
from scalerl_api.mix import PlainName
from scalerl_api.source import EvaluationTaskSpec

_EVALUATION_STEPS = Annotated[int, Field(ge=1, le=100_000_000)]
_EVALUATION_SAMPLES = Annotated[int, Field(ge=1, le=1024)]
MAX_EVALUATION_SETS: Final = 16


class EvaluationSetSpec(Model):
    """Problems that versions are evaluated on, with a curve of their own."""

    name: PlainName
    """Name of the set: in ``curve-NAME.csv`` and in the label ``set`` of metrics."""
    task: EvaluationTaskSpec | None = None
    """The problems; default: the held-out prompts of the run's task."""
    held_out_of: Annotated[str, Field(max_length=63)] | None = None
    """With ``task.mix``, in place of task: name of the task of the mix whose held-out prompts form the set."""
    every_steps: _EVALUATION_STEPS | None = None
    """Steps between evaluations; default: ``evaluation.everySteps``."""
    samples_per_prompt: _EVALUATION_SAMPLES | None = None
    """Completions per prompt; default: ``evaluation.samplesPerPrompt``."""
    k: _EVALUATION_SAMPLES | None = None
    """Largest k of pass@k; default: the completions per prompt."""

    rules = (at_most_one("task", "heldOutOf"),)


class EvaluationSpec(Model):
    """Evaluations of single weight versions on prompts that are not trained on: the points of the curve."""

    every_steps: _EVALUATION_STEPS = 100
    """Steps between evaluations."""
    samples_per_prompt: _EVALUATION_SAMPLES = 16
    """Completions per prompt; more samples reduce the standard error."""
    temperature: NonNegativeDecimal = "1"
    """Sampling temperature of evaluations; 0 is greedy."""
    hold_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """Maximum time that publishes wait for an evaluation of an earlier version; afterwards the point is marked
    as mixed. One that goes to other generators does not wait. The trainer meanwhile trains the steps that are complete, up to the next version to evaluate."""
    generators: Annotated[int, Field(ge=1, le=1023)] | None = None
    """Generators that keep the version under evaluation until its point is complete, while the others get newer ones; without it,
    all keep it. They train otherwise."""
    sets: (
        Annotated[
            list[EvaluationSetSpec],
            Field(min_length=1, max_length=MAX_EVALUATION_SETS),
            AfterValidator(Unique("name")),
        ]
        | None
    ) = None
    """All evaluation sets; default: one set, ``held-out``, with the held-out prompts of the task; for a mix, one set for each
    task, with its name. A publish waits for ``forecastSet`` only; generators evaluate the others beside training."""
    forecast_set: Annotated[str, Field(max_length=63)] | None = None
    """Name of the set that forecast, autoscaler, status and ``curve.csv`` use, or ``weighted-mean`` of the tasks of a mix;
    default: the first of sets; for a mix without sets, the weighted mean."""

    rules = (
        Rule(
            "!has(self.sets) || self.sets.filter(s, !has(s.task) && !has(s.heldOutOf)).size() <= 1",
            "no more than one of sets may leave task out: they would evaluate the same prompts. Give the others a task",
            "sets",
            lambda evaluation: (
                sum(s.task is None and s.held_out_of is None for s in evaluation.sets or ()) <= 1
            ),
        ),
        Rule(
            "!has(self.sets) || self.sets.all(s, !has(s.heldOutOf) || "
            "self.sets.filter(o, has(o.heldOutOf) && o.heldOutOf == s.heldOutOf).size() == 1)",
            "no two of sets may have the same heldOutOf: they would evaluate the same prompts. Leave one of them out",
            "sets",
            lambda evaluation: (
                len(given := [s.held_out_of for s in evaluation.sets or () if s.held_out_of is not None])
                == len(set(given))
            ),
        ),
        Rule(
            "!has(self.sets) || self.sets.all(s, !has(s.k) || s.k <= (has(s.samplesPerPrompt) ? s.samplesPerPrompt : "
            "self.samplesPerPrompt))",
            "k of each of sets must be at most its samplesPerPrompt, or evaluation.samplesPerPrompt without it: pass@k needs "
            "k completions. Raise the samples, or lower k",
            "sets",
            lambda evaluation: all(
                s.k is None or s.k <= (s.samples_per_prompt or evaluation.samples_per_prompt)
                for s in evaluation.sets or ()
            ),
        ),
    )
