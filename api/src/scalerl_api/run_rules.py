"""Checks across the sections of a spec. Checks within a section are the ``rules`` of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scalerl_api.built_in import SERVER
from scalerl_api.engines import ENGINE_RULES
from scalerl_api.fields import Rule
from scalerl_api.lora import LORA_RULES
from scalerl_api.recipe import MAX_BATCH_COMPLETIONS, RecipeSpec
from scalerl_api.recipe.presets import PRESETS, cel
from scalerl_api.weight_backends import WEIGHT_BACKEND_RULES
from scalerl_api.wire.prompts import HELD_OUT_SET, MEAN_SET

_RANKS: Final = "self.trainer.replicas * (self.trainer.devices > 1 ? self.trainer.devices : 1)"
"""``TrainerSpec.ranks`` in CEL."""
_PROMPTS: Final = cel("promptsPerStep", RecipeSpec().prompts_per_step)
_SYNCHRONOUS: Final = [
    name
    for name, fields in PRESETS.items()
    if ("offPolicy.ppo.stepsPerBatch", 1) in ((path, one.value) for path, one in fields.items())
]
"""Presets that generate each step with the weights that train it."""
_FILTER: Final = cel("zeroVarianceFilter", RecipeSpec().zero_variance_filter)
_INTERRUPTION: Final = "self.recipe.length.interruption"


def _reads_rewards(field: str, why: str, given: str, chosen: Callable[[RecipeSpec], object]) -> Rule:
    """Rule: a field of the recipe contradicts a distillation that ignores the rewards.

    Args:
        given: CEL, whether the manifest gives the field.
        chosen: whether the field is in effect.
    """
    return Rule(
        f"!has(self.recipe.distillation) || self.recipe.distillation.rewards != 'Ignored' || !({given})",
        f"recipe.{field} cannot go with recipe.distillation, whose rewards are Ignored: {why}. Leave it out, or set "
        "recipe.distillation.rewards: Added",
        f"recipe.{field}",
        lambda spec: (
            spec.recipe.distillation is None
            or spec.recipe.distillation.rewards != "Ignored"
            or not chosen(spec.recipe)
        ),
    )


def _named_server(environment: str) -> str:
    """CEL: whether an environment is the run's own servers."""
    return f"has({environment}) && has({environment}.name) && {environment}.name == '{SERVER}'"


_USES_SERVERS: Final = (
    f"({_named_server('self.task.environment')}) || (has(self.task.mix) && self.task.mix.exists(t, "
    f"{_named_server('t.environment')})) || (has(self.evaluation.sets) && self.evaluation.sets.exists(s, has(s.task) && "
    f"{_named_server('s.task.environment')}))"
)
RUN_RULES: Final = (
    Rule(
        f"has(self.environment) == ({_USES_SERVERS})",
        f"environment and a task whose environment.name is {SERVER} need each other",
        "environment",
        lambda spec: (spec.environment is not None) == spec.uses_environment_servers,
    ),
    Rule(
        "self.recipe.maxCompletionTokens < self.model.contextTokens",
        "%(recipe.maxCompletionTokens)s must be less than %(model.contextTokens)s: the prompt needs room too",
        "recipe.maxCompletionTokens",
        lambda spec: spec.recipe.max_completion_tokens < spec.model.context_tokens,
    ),
    *LORA_RULES,
    Rule(
        "self.storage.mountedBy != 'Coordinator' || has(self.checkpoint.to)",
        "storage.mountedBy Coordinator needs checkpoint.to, from which the other pods get the model, and where checkpoints are kept",
        "checkpoint.to",
        lambda spec: spec.storage.mounted_by != "Coordinator" or spec.checkpoint.to is not None,
    ),
    Rule(
        "self.storage.mountedBy != 'Coordinator' || !has(self.from)",
        "from needs a claim that the preparation and the trainer mount; leave out storage.mountedBy Coordinator",
        "from",
        lambda spec: spec.storage.mounted_by != "Coordinator" or spec.fork is None,
    ),
    Rule(
        "self.storage.mountedBy != 'Coordinator' || self.trainer.replicas == 1",
        "%(trainer.replicas)s must be 1 with storage.mountedBy Coordinator: the nodes of a trainer write each checkpoint together, on "
        "a volume that all of them mount. Raise trainer.devices instead, or use a ReadWriteMany claim",
        "trainer.replicas",
        lambda spec: spec.storage.mounted_by != "Coordinator" or spec.trainer.replicas == 1,
    ),
    Rule(
        "self.storage.mountedBy != 'Coordinator' || !has(self.generator.compileCache) || has(self.generator.compileCache.claimName)",
        "generator.compileCache needs a claimName with storage.mountedBy Coordinator: generators do not mount the run's volume",
        "generator.compileCache",
        lambda spec: (
            spec.storage.mounted_by != "Coordinator"
            or spec.generator.compile_cache is None
            or spec.generator.compile_cache.claim_name is not None
        ),
    ),
    _reads_rewards(
        "zeroVarianceFilter",
        "the teacher's log-probabilities differ where rewards are equal",
        "has(self.recipe.zeroVarianceFilter) && self.recipe.zeroVarianceFilter",
        lambda recipe: recipe.zero_variance_filter,
    ),
    _reads_rewards(
        "refill",
        "no group is dropped for equal rewards, so no place becomes free",
        "has(self.recipe.refill)",
        lambda recipe: recipe.refill,
    ),
    _reads_rewards(
        "length.penalty",
        "it changes rewards alone",
        "has(self.recipe.length) && has(self.recipe.length.penalty)",
        lambda recipe: recipe.length.penalty,
    ),
    _reads_rewards(
        "length.overlong",
        "it changes rewards alone",
        "has(self.recipe.length) && has(self.recipe.length.overlong)",
        lambda recipe: recipe.length.overlong,
    ),
    Rule(
        f"!has(self.recipe.refill) || {_FILTER}",
        "recipe.refill needs recipe.zeroVarianceFilter: true, which the preset may not have: without the filter no place "
        "becomes free",
        "recipe.refill",
        lambda spec: spec.recipe.refill is None or spec.recipe.zero_variance_filter,
    ),
    Rule(
        f"!has(self.recipe.length) || !has({_INTERRUPTION}) || !has({_INTERRUPTION}.maxTokens) || "
        f"({_INTERRUPTION}.maxTokens < self.recipe.maxCompletionTokens && (!has(self.task.mix) || self.task.mix.all(t, "
        f"!has(t.maxCompletionTokens) || {_INTERRUPTION}.maxTokens < t.maxCompletionTokens)))",
        "%(recipe.length.interruption.maxTokens)s must be less than %(recipe.maxCompletionTokens)s, and than that of each of task.mix",
        "recipe.length.interruption.maxTokens",
        lambda spec: (
            (section := spec.recipe.length.interruption) is None
            or (section.max_tokens or 0) < min(spec.completion_limits)
        ),
    ),
    Rule(
        "!has(self.trainer.microBatchTokens) || self.trainer.microBatchTokens >= self.model.contextTokens",
        "%(trainer.microBatchTokens)s must be at least %(model.contextTokens)s: the longest sequence has to fit in "
        "one pass",
        "trainer.microBatchTokens",
        lambda spec: spec.micro_batch_tokens >= spec.model.context_tokens,
    ),
    *WEIGHT_BACKEND_RULES,
    Rule(
        "self.trainer.zeroStage > 0 || self.model.dtype != 'bfloat16'",
        "trainer.zeroStage 0 keeps no float32 copy of bfloat16 weights, and small updates would be lost: choose "
        "stage 1 or more, or model.dtype: float32",
        "trainer.zeroStage",
        lambda spec: spec.trainer.zero_stage > 0 or spec.model.dtype != "bfloat16",
    ),
    *ENGINE_RULES,
    Rule(
        "!self.trainer.routerReplay || (self.generator.devices > 0 && !has(self.generator.speculation))",
        "trainer.routerReplay needs generator.devices above 0 and no generator.speculation, with which vLLM does not report the "
        "experts of a token",
        "trainer.routerReplay",
        lambda spec: (
            not spec.trainer.router_replay
            or (spec.generator.devices > 0 and spec.generator.speculation is None)
        ),
    ),
    Rule(
        f"!has(self.warmStart) || self.warmStart.batchSize >= {_RANKS}",
        "%(warmStart.batchSize)s must be at least the ranks of %(trainer.replicas)s and %(trainer.devices)s: each "
        "rank takes an example or more",
        "warmStart.batchSize",
        lambda spec: spec.warm_start is None or spec.warm_start.batch_size >= spec.trainer.ranks,
    ),
    Rule(
        "!has(self.warmStart) || has(self.warmStart.steps) || has(self.budget.split)",
        "warmStart.steps is needed without budget.split: set one of them",
        "warmStart.steps",
        lambda spec: (
            spec.warm_start is None or spec.warm_start.steps is not None or spec.budget.split is not None
        ),
    ),
    Rule(
        "!has(self.warmStart) || !(has(self.warmStart.jsonl) || has(self.warmStart.dataset)) || !has(self.task.mix) || "
        "self.task.mix.all(t, t.prompt == self.task.mix[0].prompt)",
        "warmStart.jsonl has prompts of one format, and the tasks of task.mix have different prompt sections: leave jsonl, or "
        "dataset, out, to train on the prompts of the mix, or give all tasks the same prompt",
        "warmStart",
        lambda spec: (
            spec.warm_start is None
            or not spec.warm_start.own
            or all(t.prompt == spec.task.mix[0].prompt for t in spec.task.mix or ())
        ),
    ),
    Rule(
        "!has(self.budget.split) || has(self.warmStart)",
        "budget.split divides the compute between warmStart and RL, and there is no warmStart: add it, or leave split "
        "out",
        "budget.split",
        lambda spec: spec.budget.split is None or spec.warm_start is not None,
    ),
    Rule(
        "!has(self.task.mix) || self.task.mix.all(t, !has(t.maxCompletionTokens) || "
        "t.maxCompletionTokens <= self.recipe.maxCompletionTokens)",
        "maxCompletionTokens of each of task.mix must be at most %(recipe.maxCompletionTokens)s, which memory is planned "
        "for: raise that, or lower the task's",
        "task.mix",
        lambda spec: all(
            (t.max_completion_tokens or 0) <= spec.recipe.max_completion_tokens for t in spec.task.mix or ()
        ),
    ),
    Rule(
        "!has(self.evaluation.sets) || self.evaluation.sets.all(s, !has(s.heldOutOf) || "
        "(has(self.task.mix) && self.task.mix.exists(t, t.name == s.heldOutOf)))",
        "heldOutOf of each of evaluation.sets must be the name of a task of task.mix",
        "evaluation.sets",
        lambda spec: (
            {s.held_out_of for s in spec.evaluation.sets or ()}
            <= {None, *(t.name for t in spec.task.mix or ())}
        ),
    ),
    Rule(
        "!has(self.task.mix) || !has(self.evaluation.sets) || self.evaluation.sets.all(s, "
        f"(has(s.task) || has(s.heldOutOf)) && s.name != '{MEAN_SET}')",
        f"with task.mix, each of evaluation.sets needs task or heldOutOf, and another name than {MEAN_SET}",
        "evaluation.sets",
        lambda spec: (
            spec.task.mix is None
            or all(
                (s.task is not None or s.held_out_of is not None) and s.name != MEAN_SET
                for s in spec.evaluation.sets or ()
            )
        ),
    ),
    Rule(
        "!has(self.evaluation.forecastSet) || "
        f"(has(self.task.mix) && self.evaluation.forecastSet == '{MEAN_SET}') || (has(self.evaluation.sets) ? "
        "self.evaluation.sets.exists(s, s.name == self.evaluation.forecastSet) : has(self.task.mix) ? "
        "self.task.mix.exists(t, t.name == self.evaluation.forecastSet) : "
        f"self.evaluation.forecastSet == '{HELD_OUT_SET}')",
        "%(evaluation.forecastSet)s must be the name of one of sets; without them, of a task of task.mix, or "
        f"{HELD_OUT_SET} of a run with one task. With task.mix, also {MEAN_SET}",
        "evaluation.forecastSet",
        lambda spec: (
            spec.evaluation.forecast_set is None
            or spec.evaluation.forecast_set in [s.name for s in spec.evaluation_sets]
            or (spec.task.mix is not None and spec.evaluation.forecast_set == MEAN_SET)
        ),
    ),
    Rule(
        f"!has(self.evaluation.forecastSet) || self.evaluation.forecastSet != '{MEAN_SET}' || "
        "!has(self.task.mix) || !has(self.evaluation.sets) || self.task.mix.all(t, "
        "self.evaluation.sets.exists(s, has(s.heldOutOf) && s.heldOutOf == t.name))",
        f"evaluation.forecastSet {MEAN_SET} needs a set with heldOutOf for each task of task.mix: add those, or choose a set",
        "evaluation.forecastSet",
        lambda spec: (
            spec.task.mix is None
            or spec.evaluation.forecast_set != MEAN_SET
            or {t.name for t in spec.task.mix} <= {s.held_out_of for s in spec.evaluation_sets}
        ),
    ),
    Rule(
        f"!has(self.schedule.byLength) || {_PROMPTS} > 1 || !(has(self.recipe.offPolicy) ? "
        "(has(self.recipe.offPolicy.pipeline) && self.recipe.offPolicy.pipeline.maxStalenessSteps == 0) || "
        "(has(self.recipe.offPolicy.ppo) && self.recipe.offPolicy.ppo.stepsPerBatch == 1) : "
        f"self.recipe.preset in {_SYNCHRONOUS})",
        "schedule.byLength cannot go with recipe.promptsPerStep 1 and a recipe.offPolicy that is synchronous: only one group "
        "is ever open, and there is nothing to order. Raise one of them, or leave byLength out",
        "schedule.byLength",
        lambda spec: (
            spec.schedule.by_length is None
            or spec.recipe.prompts_per_step > 1
            or spec.recipe.max_staleness_steps > 0
        ),
    ),
    Rule(
        f"{_RANKS} <= {_PROMPTS}",
        "the ranks of %(trainer.replicas)s and %(trainer.devices)s must be at most %(recipe.promptsPerStep)s: each "
        "rank takes a prompt or more",
        "trainer.replicas",
        lambda spec: spec.trainer.ranks <= spec.recipe.prompts_per_step,
    ),
    Rule(
        f"{_PROMPTS} * self.recipe.completionsPerPrompt <= {MAX_BATCH_COMPLETIONS}",
        "%(recipe.promptsPerStep)s times %(recipe.completionsPerPrompt)s must be at most "
        f"{MAX_BATCH_COMPLETIONS}: the coordinator holds every completion of a step in memory",
        "recipe.promptsPerStep",
        lambda spec: (
            spec.recipe.prompts_per_step * spec.recipe.completions_per_prompt <= MAX_BATCH_COMPLETIONS
        ),
    ),
    Rule(
        "!has(self.autoscaling.generators) || (self.autoscaling.generators.min <= self.generator.replicas && "
        "self.generator.replicas <= self.autoscaling.generators.max)",
        "%(generator.replicas)s must lie within %(autoscaling.generators)s",
        "generator.replicas",
        lambda spec: (
            (allowed := spec.autoscaling.generators) is None
            or allowed.min <= spec.generator.replicas <= allowed.max
        ),
    ),
    Rule(
        "!has(self.checkpoint.to) || !has(self.trainer.export.to) || (self.trainer.export.to != self.checkpoint.to && "
        # Not `in [to, to + '/']`: an API server estimates the length of a concatenation as unbounded.
        "!(self.trainer.export.to.endsWith('/') && self.trainer.export.to.startsWith(self.checkpoint.to) && "
        "size(self.trainer.export.to) == size(self.checkpoint.to) + 1))",
        "%(checkpoint.to)s must differ from %(trainer.export.to)s: both have folders by step, and each removes the other's",
        "checkpoint.to",
        lambda spec: (
            spec.checkpoint.to is None or spec.checkpoint.to != (spec.trainer.export.to or "").rstrip("/")
        ),
    ),
)
