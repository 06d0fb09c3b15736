"""Fields of a line of ``metrics.jsonl``: of the coordinator, of the trainer, and of each task of a mix (``reward_task_NAME`` beside ``reward``).

``docs/reference/metrics.md`` lists them. Not listed are the parts of verdicts (``reward_part_NAME``), what a loss of a package counts
(``ratio_NAME_fraction``), and the ranges of positions of a mismatch (:mod:`.mismatch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TASK_FIGURES: Final[Mapping[str, str]] = {
    "reward": "Mean score of the completions",
    "groups": "Groups",
    "filtered_groups": "Groups without a gradient",
    "given_up_groups": "Slots that were given up",
    "rollouts": "Completions",
    "completion_tokens": "Tokens of the completions",
    "mean_completion_tokens": "Mean tokens of a completion",
    "completion_tokens_p90": "90th percentile of the tokens of a completion",
    "right_completion_tokens": "Mean tokens of the completions that score at least 0.5",
    "wrong_completion_tokens": "Mean tokens of the completions that score less than 0.5",
    "unsolved_groups_fraction": "Part of the graded groups whose completions all score 0",
    "solved_groups_fraction": "Part of the graded groups whose completions all score 1",
    "truncated_fraction": "Part of the completions that were cut off at their maximum length",
    "looped_fraction": "Part of the completions that end in a loop: at least 4 copies, and 64 tokens, of a pattern of up to 512 tokens",
    "unanswered_fraction": "Part of the graded completions in which the verifier found no answer, right or wrong",
    "distinct_fraction": "Mean over the groups of the part of their completions that are distinct, token for token",
    "grading_errors": "Completions that could not be graded",
    "episode_turns": "With an environment, mean replies of an episode",
    **{
        f"solved_at_turn_{number}": f"Part of the graded episodes that score 1 with their {text}"
        for number, text in enumerate(
            ("first reply", "second reply", "third reply", "fourth reply, or a later one"), 1
        )
    },
    "malformed_calls_fraction": "Part of the calls of tools that could not be made, or had no JSON",
    "environment_tokens_fraction": "Part of the tokens of episodes that the environment wrote",
    "environment_seconds_fraction": "Part of the time of episodes in which they waited for their environment",
}
"""Figures of a step or of a task in it, with their descriptions. Means and parts over nothing are absent."""
SOLVED_AT_TURNS: Final = 4
"""Turns with a figure ``solved_at_turn_N``; the last one stands for all later ones."""
STEP_FIGURES: Final[Mapping[str, str]] = {
    "step_seconds": "Seconds since the report of the step before",
    "trainer_bubble_fraction": "Part of this time in which the trainer did not compute",
    "generator_bubble_fraction": "Part of the generators' time in it without a request in flight (they report it every few seconds)",
    "generated_tokens_per_second": "Completion tokens that the generators sampled in it, per second",
    "consumed_tokens_per_second": "Completion tokens of the step, filtered groups included, per second",
}
"""Figures of a step as a whole, from the coordinator; absent if the step before is not known."""
RUN_FIGURES: Final[Mapping[str, str]] = {
    "step": "Number of the step, from 0",
    "version": "Version of the weights after it",
    "wall_seconds": "Seconds of mid-training and since the first lease, up to the report of the step",
    "device_seconds": "The same, times the devices",
    "generator_busy_fraction": "Part of the generators' time with a request in flight, over the run",
    "trainer_busy_fraction": "Part of `wall_seconds` in which the trainer computed",
    "work_tokens": "Completion tokens of the steps up to this one, filtered groups included",
    "generated_tokens": "Completion tokens that the generators sampled, over the run",
    "checkpoint_failures": "Checkpoints that could not be written, over the run",
    "skipped": "1 if the update was not applied because a figure was not finite or ratios were too far from 1; else 0",
    "refilled_groups": "Filtered groups whose slots got another prompt",
    "masked_tokens": "Completion tokens that are not trained on, such as an inserted interruption or an environment's messages",
    "unusable_tokens": "The part of them that is masked because the generator's log-probability was not finite",
    "trained_tokens": "Completion tokens with a gradient; 0 for a skipped step",
    "staleness_mean": "Mean age of the trained tokens, in versions: that of the step minus that which sampled the token",
    "staleness_max": "The largest such age",
    "prompts_crc32": "CRC-32 of the step's prompts, to see whether two runs had the same ones",
}
"""Fields that every line has, from the coordinator."""
GRADIENT_KINDS: Final[Mapping[str, str]] = {
    "embedding": "embeddings, also where they are the output's",
    "attention": "attention",
    "mlp": "MLPs and experts, with their routers",
    "norm": "normalisations",
    "head": "the output's own weights",
    "other": "other weights, such as those of state-space layers",
}
TRAINER_FIGURES: Final[Mapping[str, str]] = {
    "loss": "Loss of the batch, as the recipe weights it",
    "learning_rate": "Learning rate of the update",
    "applied": "1 if the weights changed; 0 for a skipped step, and for one without a trained token",
    "computed_tokens": "Tokens of prompts and completions in the forward pass; of a prompt that rows share, once",
    "padding_fraction": "Part of the computed positions that hold no token",
    "guard_masked_tokens": "Trained tokens left out of the step because they would have had most of its squared gradient",
    "filtered_fraction": "Part of the groups without a gradient",
    "ungraded_completions": "Completions without a verdict, which are not trained on",
    "reward_mean": "Mean score of the graded completions of the step's groups, in [0, 1]; of filled slots, without the tries before them",
    "reward_std": "Standard deviation of these scores",
    "shaped_reward_mean": "Mean of the rewards that are trained on, which depend on the length as well",
    "completion_tokens_mean": "Mean tokens of a completion of these groups",
    "wait_seconds": "Seconds that the trainer waited for rollouts, evaluations or generators",
    "shard_seconds": "Seconds to fetch the step's rollouts; as the next two a mean over the ranks",
    "forward_backward_seconds": "Seconds of packing, forward and backward passes",
    "optimizer_seconds": "Seconds of the rest of the gradient reduction and of the optimizer",
    "busy_seconds": "Sum of the last two",
    "publish_wait_seconds": "Seconds in which a publish delayed the trainer: its own part of the probe, and where the publish took longer than "
    "the forward and backward passes beside it",
    "publish_seconds": "Seconds to publish the weights, beside the step, if they were; as the fields below, of the last publish before the step was reported",
    "publish_open_seconds": "Seconds to open the group with the generators, in the last attempt; 0 from files",
    "publish_gather_seconds": "Seconds to gather the weights, in the last attempt; to files, and to write them",
    "publish_send_seconds": "Seconds in which rank 0 sent, in the last attempt; 0 from files",
    "publish_pause_seconds": "Seconds until generation paused, at the slowest generator",
    "publish_transfer_seconds": "Seconds to receive or to read the weights, at the slowest generator",
    "publish_load_seconds": "Seconds to load them into vLLM, at the slowest generator",
    "publish_resume_seconds": "Seconds until generation resumed, at the slowest generator",
    "publish_rounds": "Attempts of the publish; from files 1, or 0 if they could not be written",
    "publish_members": "Generators that got the version",
    "publish_failed_members": "Generators that did not",
    "publish_bytes": "Bytes of the weights",
    "probe_seconds": "Seconds of the probe: the trainer's part, and the generators'",
    "probe_failed": "1 if no generator answered the probe, or the trainer's own log-probabilities were not finite; else absent",
    "checkpoint_seconds": "Seconds in which a checkpoint delayed the trainer",
    "export_seconds": "Seconds in which an export delayed it",
    "checkpoint_uploaded": "With `checkpoint.to`, the step of the newest complete copy",
    "entropy": "Mean entropy of the policy over the trained tokens, in nats",
    "router_entropy": "With experts, the entropy of the routers' softmax, in nats: mean over trained tokens and layers. Even: log of the number "
    "of experts",
    "expert_load_max": "With experts, the trained tokens of the busiest one of any layer, in units of the mean over its layer: 1 if even, at most "
    "experts / experts per token; minus 1 it is MaxVio of arXiv 2408.15664",
    "expert_load_min": "The same of the least busy one: 0 for one without a token",
    "unreplayed_tokens": "With `trainer.routerReplay`, the computed tokens of prompts and completions whose experts no generator recorded, so that "
    "the trainer's own routers chose them",
    "grad_norm": "Norm of the gradient before clipping; of an update that was not applied (`applied` is 0) the one that was not",
    **{
        f"grad_norm_{kind}": f"Norm of its part for {text}; of applied updates"
        for kind, text in GRADIENT_KINDS.items()
    },
    "mfu": "Model FLOP utilisation while the trainer computes (arXiv 2204.02311, appendix B): 6 FLOP per parameter and token, attention "
    "and recomputed activations not included, as part of the devices' peak in bfloat16. Absent on CPUs, on GPUs of unknown peak, in "
    "float32, and with mixtures of experts",
    "sampled_kl": "KL estimate (k3) of trainer against generators in nats per token, on tokens sampled by the step's weights",
    "sampled_tokens": "Number of these tokens",
    "probe_kl": "The same on sequences that a generator scored in one pass after the last publish",
    "probe_tokens": "Number of their tokens",
    "probe_max_difference": "Largest difference of the two log-probabilities of a token of them, in nats",
    "ratio_kl": "The same on all trained tokens: how far the policy has moved since they were sampled",
    "ratio_tokens": "Number of these tokens",
    "ratio_mean": "Mean ratio of the trainer's to the generator's probability of a trained token",
    "ratio_max": "The largest such ratio",
    "ratio_beyond_fraction": "Part of the trained tokens whose ratio, or its inverse, is an outlier, or not a number",
    "effective_sample_fraction": "Effective sample size of the ratios as importance weights, as part of the tokens: (Σρ)² / (N Σρ²)",
    "ratio_truncated_fraction": "Part of the trained tokens whose ratio the loss truncates (CISPO, DPPO)",
    "ratio_clipped_fraction": "Part of the trained tokens without a gradient because of the loss's clip or mask (PPO, GSPO, DPPO)",
    "ratio_corrected_fraction": "Part of the trained tokens that `recipe.correction` truncates or masks",
    "ratio_off_policy_masked_fraction": "Part of the trained tokens that `recipe.offPolicyMask` masks",
    "start_kl": "KL(start ‖ now) in nats per token (k3), of the last published weights from those of the start of the run, or of the end of its "
    "warm start; of a fork, from the start of its source. Over tokens that the start sampled: up to 32 completions of the first batch, of prompts "
    "with a gradient, shortened to some 8,192 tokens, which ride in the checkpoint. Measured with the probe of every fourth version; absent after a "
    "resumption from a checkpoint without them",
    "start_kl_k1": "The same by k1, the mean of log π_start - log π_now, which may be negative",
    "reference_kl": "KL estimate to the start of the run, or to another reference, in nats per token: with `recipe.kl.penalty`, which "
    "holds a second model and scores the batch with it",
    "teacher_kl": "KL estimate to the teacher of `recipe.distillation`, in nats per token",
}
"""Figures of a step from the trainer, by name in ``metrics.jsonl`` and in ``scalerl_trainer_step_stat``."""
_BETWEEN: Final = "_task_"


def task_key(figure: str, task: str) -> str:
    """Key of a task's figure in a line of ``metrics.jsonl``."""
    return f"{figure}{_BETWEEN}{task}"


def by_task(row: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The figures of each task in a line, by task; empty for a run with one.

    >>> by_task({"reward": 0.25, "reward_task_sums": 0.5, "groups_task_sums": 4})
    {'sums': {'reward': 0.5, 'groups': 4}}
    """
    found: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        figure, between, task = key.partition(_BETWEEN)
        if between and figure in TASK_FIGURES:
            found.setdefault(task, {})[figure] = value
    return found
