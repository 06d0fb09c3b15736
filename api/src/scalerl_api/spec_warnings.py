"""Warnings about values of a spec that are allowed, but unusual. Pure.

``scalerl validate`` and ``scalerl run`` print them. On a cluster they are the message of ``Accepted``, whose reason is then
``AcceptedWithWarnings``. A warning never causes a rejection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from scalerl_api.built_in import SERVER
from scalerl_api.fields import quantity_bytes
from scalerl_api.generator_spec import MAX_LEASED
from scalerl_api.load import SpecProblem, data_paths
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.roles import state_bytes
from scalerl_api.pods import PodTemplate
from scalerl_api.recipe import RecipeSpec
from scalerl_api.recipe.loss import LossKind
from scalerl_api.spec import RunSpec
from scalerl_api.wire.prompts import MAIN_TASK

HIGH_LEARNING_RATE: Final = 1e-3
LOW_ADAPTER_LEARNING_RATES: Final = {"float32": 2e-6, "bfloat16": 1e-4}
"""Times alpha / rank, by the model's dtype: below the second, most of an update is rounded away when weights are merged (docs/lora.md)."""
HIGH_TEMPERATURE: Final = 2.0
CODE_VARIABLES: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH")
"""Variables that make a container run code other than its image's."""
_ROLES: Final = ("coordinator", "generator", "trainer")


def past_deadline(spec: RunSpec, unix_seconds: float) -> SpecProblem | None:
    """Warning about a deadline before ``unix_seconds``: the first forecast stops a run that starts then."""
    scaling = spec.autoscaling
    if scaling.deadline is None or scaling.mode == "Off":
        return None
    if datetime.fromisoformat(scaling.deadline).timestamp() > unix_seconds:
        return None
    return SpecProblem(
        "spec.autoscaling.deadline", f"{scaling.deadline} is over", "set a later time, or leave it out"
    )


def warnings_of(spec: RunSpec) -> list[SpecProblem]:
    return [
        *_of_the_recipe(spec),
        *_of_steps(spec),
        *_of_storage(spec),
        *_of_pods(spec),
        *_of_sessions(spec),
        *_of_unread_fields(spec),
    ]


def local_warnings_of(spec: RunSpec) -> list[SpecProblem]:
    """Warnings that apply only on one machine: ``spec.environment`` is one process there, for all generators."""
    if spec.environment is None or (has := spec.environment.sessions_per_replica) is None:
        return []
    here = [one for one in spec.server_environments.values() if one.name == SERVER]
    needed = spec.generator.replicas * sum(min(one.sessions, _episodes(spec)) for one in here)
    if has >= needed:
        return []
    return [
        SpecProblem(
            "spec.environment.sessionsPerReplica",
            f"is {has}, for {needed:,} sessions of generators: {needed - has:,} episodes wait for one, and each step replays those before "
            "it",
            "raise it with the server's own limit, or lower generator.maxConcurrentSequences",
        )
    ]


def cluster_warnings_of(spec: RunSpec) -> list[SpecProblem]:
    """Warnings that apply only on a cluster: paths without a mounted volume, missing credentials."""
    mounted = {
        mount["mountPath"].rstrip("/") for one in _templates(spec).values() for mount in one.volume_mounts
    }
    paths = {"spec.model.path": spec.model.path}
    if spec.trackers.tensor_board is not None:
        paths["spec.trackers.tensorBoard.directory"] = spec.trackers.tensor_board.directory
    paths |= {field: path for field, path in data_paths(spec).items() if path is not None}
    return [
        *_of_trackers(spec),
        *_of_paths(paths, mounted),
        *_of_identities(spec),
        *_of_weight_store(spec),
    ]


def _templates(spec: RunSpec) -> dict[str, PodTemplate]:
    """The given templates, by path of the field."""
    found = {f"spec.{role}.podTemplate": getattr(spec, role).pod_template for role in _ROLES}
    found = {"spec.podTemplate": spec.pod_template} | found
    return {where: one for where, one in found.items() if one is not None}


def _pods(spec: RunSpec, role: str) -> PodTemplate:
    """The template of a role's pods."""
    own: PodTemplate = getattr(spec, role).pod_template or PodTemplate()
    return own.over(spec.pod_template)


def _gives(pods: PodTemplate, variable: str) -> bool:
    """Whether pods have a variable, or may have it from a Secret."""
    return bool(pods.env_from) or any(entry["name"] == variable for entry in pods.env)


def _of_trackers(spec: RunSpec) -> Iterator[SpecProblem]:
    if spec.trackers.wandb is None or spec.trackers.wandb.offline:
        return
    if not _gives(_pods(spec, "coordinator"), "WANDB_API_KEY"):
        yield SpecProblem(
            "spec.trackers.wandb",
            "coordinator.podTemplate.env has no WANDB_API_KEY",
            "give it from a Secret, or set offline: true",
        )


def _of_identities(spec: RunSpec) -> Iterator[SpecProblem]:
    """Pods that fetch the prepared model have the variables of the trainer, but not its service account."""
    trainer = _pods(spec, "trainer")
    has_keys = _gives(trainer, "AWS_ACCESS_KEY_ID")
    if spec.storage.mounted_by != "Coordinator" or trainer.service_account_name is None or has_keys:
        return
    accounts = {"generator": (spec.generator.pod_template or PodTemplate()).service_account_name}
    if spec.generator.speculation is not None and spec.generator.speculation.history is not None:
        accounts["coordinator"] = _pods(spec, "coordinator").service_account_name
    for role, account in accounts.items():
        if account is None:
            yield SpecProblem(
                f"spec.{role}.podTemplate.serviceAccountName",
                f"is not given, and fetch-model in a {role}'s pod reads the model from checkpoint.to; the trainer's account "
                f"{trainer.service_account_name} is not that pod's",
                "give an account that may read the bucket, or keys in trainer.podTemplate.env, which fetch-model alone gets",
            )


def _of_weight_store(spec: RunSpec) -> Iterator[SpecProblem]:
    """Trainer and generators access ``weightSync.to`` each with their own credentials."""
    if spec.weight_sync.to is None:
        return
    own = spec.generator.pod_template or PodTemplate()  # generators have no account of the run's template
    accounts = {
        "trainer": _pods(spec, "trainer").service_account_name,
        "generator": own.service_account_name,
    }
    for role, account in accounts.items():
        if account is None and not _gives(_pods(spec, role), "AWS_ACCESS_KEY_ID"):
            yield SpecProblem(
                f"spec.{role}.podTemplate.env",
                f"has no AWS_ACCESS_KEY_ID, with which the {role} would access weightSync.to",
                "give keys from a Secret, or a serviceAccountName; generators need to read alone",
            )


def _of_paths(paths: dict[str, str | None], mounted: set[str]) -> list[SpecProblem]:
    return [
        SpecProblem(
            where,
            f"{path} lies in no volume that a podTemplate mounts, so the image would have to have it",
            "mount a volume with it by podTemplate.volumes and podTemplate.volumeMounts",
        )
        for where, path in paths.items()
        if path is not None and not any(path == at or path.startswith(f"{at}/") for at in mounted)
    ]


def _of_the_recipe(spec: RunSpec) -> Iterator[SpecProblem]:
    recipe = spec.recipe
    rate = float(recipe.optimizer.learning_rate)
    if rate > HIGH_LEARNING_RATE:
        yield SpecProblem(
            "spec.recipe.optimizer.learningRate",
            f"{recipe.optimizer.learning_rate} is more than policies are trained with",
            "1e-7 to 1e-5 for pretrained models, at most 1e-3 for tiny ones",
        )
    lora = spec.trainer.lora
    if lora is not None and rate * lora.alpha / lora.rank < LOW_ADAPTER_LEARNING_RATES[spec.model.dtype]:
        rounded = (
            ", and whose merged weights are rounded to bfloat16" if spec.model.dtype == "bfloat16" else ""
        )
        yield SpecProblem(
            "spec.recipe.optimizer.learningRate",
            f"{recipe.optimizer.learning_rate} is little for the adapters of trainer.lora, which need about ten times the rate of "
            f"whole weights{rounded}",
            "1e-4 or more in bfloat16, or a larger trainer.lora.alpha; 1e-5 to 1e-4 in float32 for pretrained models",
        )
    if float(recipe.temperature) > HIGH_TEMPERATURE:
        yield SpecProblem(
            "spec.recipe.temperature",
            f"at {recipe.temperature} completions are close to noise",
            "1 samples the policy itself",
        )
    if recipe.distillation is not None and float(recipe.temperature) != 1.0:
        yield SpecProblem(
            "spec.recipe.temperature",
            f"the teacher of recipe.distillation computes at temperature 1, the student samples at {recipe.temperature}",
            "set it to 1",
        )
    unused = _without_effect_under_correction(recipe)
    if unused:
        yield SpecProblem(
            "spec.recipe.correction",
            f"{' and '.join(unused)} of recipe.loss.{recipe.loss.name} {'have' if len(unused) > 1 else 'has'} no effect: under a "
            "correction the loss's ratio is that of the trained policy to the trainer's own policy before the first of the "
            "updates that share sampled weights, which is 1 with one update for each",
            "set offPolicy.ppo.stepsPerBatch to more than 1, or correction to {none: {}}, with which the ratio is to the policy "
            "that sampled",
        )


def _without_effect_under_correction(recipe: RecipeSpec) -> Sequence[str]:
    """Fields of the loss that bound a ratio which is always 1."""
    if recipe.correction.truncated is None and recipe.correction.masked is None:
        return ()
    if recipe.updates_per_sampled_weights > 1:
        return ()
    loss = recipe.loss.chosen
    return loss.ratio_bounds if isinstance(loss, LossKind) else ()


def _of_steps(spec: RunSpec) -> Iterator[SpecProblem]:
    recipe, most = spec.recipe, spec.budget.max_steps
    if most is not None:
        for field, steps, what in (
            (
                "evaluation.everySteps",
                spec.evaluation.every_steps,
                "the curve has points at its two ends only",
            ),
            ("checkpoint.everySteps", spec.checkpoint.every_steps, "a failure costs the whole run"),
            (
                "recipe.optimizer.warmupSteps",
                recipe.optimizer.warmup_steps,
                "the full learning rate is not reached",
            ),
        ):
            if steps > most:
                yield SpecProblem(f"spec.{field}", f"{steps} is more than budget.maxSteps ({most}): {what}")
    batch = recipe.prompts_per_step * recipe.completions_per_prompt
    held_out = {one.name: one.section.held_out.size for one in spec.task.tasks}
    if spec.task.mix is None and all(one.task is not None for one in spec.evaluation_sets):
        yield SpecProblem(
            "spec.task.heldOut",
            f"no set of evaluation.sets evaluates its {held_out[MAIN_TASK]} prompts, which are not trained on",
            "add a set without task, or lower size",
        )
    kept, replicas = spec.evaluation.generators, spec.generator.replicas
    if kept is not None and kept >= replicas:
        yield SpecProblem(
            "spec.evaluation.generators",
            f"{kept} is not less than generator.replicas ({replicas}): no other generator gets newer weights during an evaluation, as "
            "without this field",
            "lower it, or raise replicas",
        )
    for at, one in enumerate(spec.evaluation_sets):
        prompts = held_out[one.held_out_of or MAIN_TASK] if one.task is None else one.task.size
        if prompts is None:
            continue  # all of its source, and 1,000 at most: the preparation counts them
        evaluation = prompts * (one.samples_per_prompt or spec.evaluation.samples_per_prompt)
        trained = batch * (one.every_steps or spec.evaluation.every_steps)
        if evaluation > trained:
            yield SpecProblem(
                f"spec.evaluation.sets.{at}" if spec.evaluation.sets else "spec.evaluation",
                f"an evaluation samples {evaluation} completions, more than the {trained} that are trained on between two",
                "evaluate less often, or lower samplesPerPrompt or the number of prompts",
            )


def _of_storage(spec: RunSpec) -> Iterator[SpecProblem]:
    storage = spec.storage
    if spec.model.scratch is not None and storage.claim_name is None and storage.mounted_by == "AllPods":
        needed = state_bytes(ModelSize.of_scratch(spec.model.scratch), spec) * (spec.checkpoint.keep + 1)
        if needed > quantity_bytes(storage.size):
            yield SpecProblem(
                "spec.storage.size",
                f"{storage.size} is less than the {needed / 2**30:.1f}Gi of {spec.checkpoint.keep} checkpoints and one "
                "that is being written",
                "raise it, or lower checkpoint.keep",
            )
    if storage.mounted_by == "Coordinator" and spec.warm_start is not None:
        yield SpecProblem(
            "spec.warmStart",
            "with storage.mountedBy: Coordinator, mid-training begins again if the trainer's pod ends before its last step",
            "storage.mountedBy: AllPods keeps its checkpoints",
        )
    speculation = spec.generator.speculation
    if speculation is not None and speculation.history is not None and storage.claim_name is None:
        store_size = speculation.history.store_size
        if quantity_bytes(store_size) >= quantity_bytes(storage.size):
            yield SpecProblem(
                "spec.generator.speculation.history.storeSize",
                f"{store_size} is not less than storage.size ({storage.size}), and the volume also holds checkpoints",
                "lower it, or raise storage.size",
            )
    if storage.on_delete == "Delete" and spec.ttl_seconds_after_finished is not None:
        yield SpecProblem(
            "spec.ttlSecondsAfterFinished",
            f"the run's volume is deleted with it, {spec.ttl_seconds_after_finished} s after the run has ended",
            "storage.onDelete: Retain keeps the model",
        )


def _of_pods(spec: RunSpec) -> Iterator[SpecProblem]:
    resources = {"spec.generator.actorResources": spec.generator.actor_resources}
    for where, template in _templates(spec).items():
        for index, entry in enumerate(template.env):
            if entry["name"] in CODE_VARIABLES:
                yield SpecProblem(
                    f"{where}.env[{index}]",
                    f"{entry['name']} makes the roles run other code than their image has",
                    "put the code into the image that spec.images names",
                )
        claims = template.resource_claims or (
            spec.pod_template is not None and spec.pod_template.resource_claims
        )
        if not claims:
            resources[f"{where}.resources"] = template.resources
    for where, given in resources.items():
        if spec.device_resource in given.limits | given.requests:
            yield SpecProblem(
                where,
                f"{spec.device_resource} is set by generator.devices and trainer.devices; without those a role runs on CPUs, "
                "and this setting does not change that",
            )


def _of_sessions(spec: RunSpec) -> Iterator[SpecProblem]:
    episodes, most = _episodes(spec), _episodes(spec, MAX_LEASED)
    more = "" if most == episodes else f"; while steps are slow, up to {most:,} episodes are leased"
    for field, one in spec.server_environments.items():
        if "sessions" in (one.parameters or {}) and one.sessions < episodes:
            yield SpecProblem(
                f"{field}.parameters.sessions",
                f"{one.url or SERVER}: a generator samples up to {episodes:,} episodes at once, and has {one.sessions:,} sessions: "
                f"{episodes - one.sessions:,} wait for one, and each step replays those before it{more}",
                "raise it, and what the servers have, or lower generator.maxConcurrentSequences",
            )


def _episodes(spec: RunSpec, times: int = 1) -> int:
    """Episodes that a generator has at once, at most: ``times`` those that it samples."""
    recipe = spec.recipe
    leased = recipe.prompts_per_step * recipe.completions_per_prompt * (1 + recipe.max_staleness_steps)
    return min(
        times * spec.generator.max_concurrent_sequences, math.ceil(leased / max(1, spec.generator.replicas))
    )


def _of_unread_fields(spec: RunSpec) -> Iterator[SpecProblem]:
    scaling = spec.autoscaling
    if scaling.mode == "Off":
        for name in ("deadline", "target", "price_per_device_hour", "generators"):
            if getattr(scaling, name) is not None:
                alias = type(scaling).model_fields[name].alias
                yield SpecProblem(
                    f"spec.autoscaling.{alias}", "is not used with mode: Off", "set mode to Advisory or Auto"
                )
    if spec.generator.devices and spec.generator.kv_cache is not None:
        yield SpecProblem(
            "spec.generator.kvCache",
            "is for CPUs; on devices vLLM takes what memoryFraction leaves",
            "leave it out",
        )
    for role, section in (("generator", spec.generator), ("trainer", spec.trainer)):
        if section.device_memory is not None and not section.devices:
            yield SpecProblem(
                f"spec.{role}.deviceMemory",
                f"is not used with {role}.devices: 0",
                "leave it out, or set devices",
            )
    if bool(spec.generator.devices) != bool(spec.trainer.devices):
        without = "trainer" if spec.generator.devices else "generator"
        yield SpecProblem(
            f"spec.{without}.devices", f"the {without} runs on CPUs while the other side has accelerators"
        )
    trainer = spec.trainer
    if (
        trainer.zero_stage == 3
        and trainer.ranks == 1
        and trainer.engine == "DeepSpeed"
        and trainer.offload == "None"
    ):
        yield SpecProblem(
            "spec.trainer.zeroStage",
            "3 partitions nothing over one rank, and DeepSpeed waits for the device at each parameter: on an H200, steps of a 0.5B model took 3 "
            "to 11 times as long as at 1",
            "set 1",
        )
