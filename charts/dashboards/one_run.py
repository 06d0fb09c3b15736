"""One run, from its curve down to its disk."""

from __future__ import annotations

from panels import Board, Panel, Query, Section, Variable, lines, number, quantiles

from scalerl_api import operator_metric_names as operator

RUN = 'namespace="$namespace", run="$run"'


def stat_of(name: str) -> str:
    """A scalar of the newest trained step."""
    return f'max(scalerl_trainer_step_stat{{{RUN}, name="{name}"}})'


def rate(counter: str, by: str = "", more: str = "") -> str:
    """Increase a second, summed over the run, apart by ``by``."""
    matchers = f"{RUN}, {more}" if more else RUN
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{matchers}}}[$__rate_interval]))"


def newest(metric: str, more: str = "") -> str:
    """A value that one process of the run has."""
    return f"max({metric}{{{f'{RUN}, {more}' if more else RUN}}})"


def by_position(title: str, description: str, source: str) -> Panel:
    """One measurement of the mismatch, over all tokens and by their position."""
    metric = f'max by (positions) (scalerl_coordinator_mismatch_kl{{{RUN}, source="{source}"}})'
    return lines(title, description, (metric, "{{positions}}"))


def of_task(figure: str) -> str:
    """A figure of the newest step for each task of a mix."""
    return f"max by (task) (scalerl_coordinator_task_{figure}{{{RUN}}})"


CURVE = Section(
    "Progress",
    (
        number(
            "Reward",
            "Held-out reward at the latest evaluation.",
            newest("scalerl_coordinator_evaluation_reward"),
        ),
        number("Step", "Steps trained.", newest("scalerl_coordinator_step")),
        number("Generators", "Registered with the coordinator.", newest("scalerl_coordinator_members")),
        number(
            "Device-hours",
            "Devices times time, including earlier attempts.",
            f"max(scalerl_coordinator_device_seconds_total{{{RUN}}}) / 3600",
        ),
        number(
            "Last checkpoint",
            "Step of the latest checkpoint.",
            newest("scalerl_trainer_checkpoint_step"),
        ),
        number(
            "Mismatch",
            "KL estimate of trainer against generators on tokens sampled and trained at one version; above "
            "0.01 indicates a mismatch.",
            newest("scalerl_coordinator_mismatch_kl", 'source="sampled", positions="all"'),
        ),
        lines(
            "Reward",
            "Mean score of each evaluation on held-out prompts, and of each step on training prompts.",
            (newest("scalerl_coordinator_evaluation_reward"), "held out"),
            (stat_of("reward_mean"), "training prompts"),
            width=12,
            maximum=1.0,
            minimum=None,
        ),
        lines(
            "pass@k",
            "Estimated chance that at least one of k completions of a held-out prompt scores 1.",
            (f"max by (k) (scalerl_coordinator_evaluation_pass_at{{{RUN}}})", "pass@{{k}}"),
            width=6,
            maximum=1.0,
        ),
        lines(
            "Tokens",
            "Sampled by generators; trained (with a gradient).",
            (rate("scalerl_actor_tokens_total"), "generated"),
            (rate("scalerl_trainer_tokens_total"), "trained"),
            unit="tps",
            width=6,
        ),
        lines(
            "Busy",
            "Fraction of the run: generators with a request in flight, trainer computing. The lower one waits for the other.",
            (newest("scalerl_coordinator_generator_busy_fraction"), "generators"),
            (newest("scalerl_coordinator_trainer_busy_fraction"), "trainer"),
            unit="percentunit",
            width=6,
            maximum=1.0,
        ),
        lines(
            "Bubbles and utilisation",
            "Of the latest step: time in which the trainer did not compute, and generators had nothing in flight; model FLOP "
            "utilisation of the trainer while it computes.",
            (newest("scalerl_coordinator_trainer_bubble_fraction"), "trainer"),
            (newest("scalerl_coordinator_generator_bubble_fraction"), "generators"),
            (stat_of("mfu"), "MFU"),
            unit="percentunit",
            width=6,
            maximum=1.0,
        ),
    ),
)

AHEAD = Section(
    "Forecast and budget",
    (
        Panel(
            "State",
            "Phase, reason and latest decision; docs/operations.md explains each.",
            (
                Query(f"max by (phase, reason) ({operator.RUN_PHASE}{{{RUN}}})", unit="hidden"),
                Query(f"max by (state) ({operator.RUN_DECISION}{{{RUN}}})", unit="hidden"),
            ),
            kind="rows",
            height=4,
        ),
        number(
            "Time left",
            "Until the first limit of the budget, at the pace of the latest evaluations.",
            f"{newest(operator.RUN_ESTIMATED_END)} - time()",
            unit="s",
        ),
        number(
            "To the deadline",
            "Time between the estimated end of the budget and the deadline; negative if it ends too late.",
            f"{newest(operator.RUN_DEADLINE)} - {newest(operator.RUN_ESTIMATED_END)}",
            unit="s",
        ),
        number(
            "Gain is worthwhile",
            "Probability of a gain above autoscaling.minGain at the horizon.",
            newest(operator.RUN_FORECAST_GAIN_PROBABILITY),
            unit="percentunit",
        ),
        number(
            "Horizon",
            "Compute of the forecast, in completion tokens of trained steps.",
            newest(operator.RUN_FORECAST_TOKENS),
        ),
        lines(
            "Forecast",
            "Reward predicted at the horizon with its 90 % interval, and the latest evaluation.",
            (f"max by (bound) ({operator.RUN_FORECAST_REWARD}{{{RUN}}})", "{{bound}}"),
            (newest("scalerl_coordinator_evaluation_reward"), "measured"),
            minimum=None,
            maximum=1.0,
        ),
        lines(
            "Asymptote",
            "Reward of unlimited compute with its 90 % interval.",
            (f"max by (bound) ({operator.RUN_FORECAST_ASYMPTOTE}{{{RUN}}})", "{{bound}}"),
            minimum=None,
            maximum=1.0,
        ),
        lines(
            "Expected gain",
            "Gain of reward from now to the horizon with its 90 % interval.",
            (f"max by (bound) ({operator.RUN_FORECAST_GAIN}{{{RUN}}})", "{{bound}}"),
            minimum=None,
        ),
        lines(
            "Budget used",
            "By limit.",
            (f"max by (limit) ({operator.RUN_BUDGET_USED}{{{RUN}}})", "{{limit}}"),
            unit="percentunit",
        ),
        lines(
            "Steps",
            "Trained, and the limit.",
            (newest(operator.RUN_STEP), "trained"),
            (newest(operator.RUN_MAX_STEPS), "budget.maxSteps"),
        ),
        lines(
            "Votes for a stop",
            "Consecutive evaluations that voted for a stop, and as many as it needs.",
            (newest(operator.RUN_STOP_VOTES), "votes"),
            (newest(operator.RUN_STOP_VOTES_NEEDED), "needed"),
        ),
    ),
)

TASKS = Section(
    "Tasks of a mix",
    (
        lines(
            "Training reward",
            "Mean score of the latest step's completions; only with task.mix.",
            (of_task("reward"), "{{task}}"),
            maximum=1.0,
            minimum=None,
        ),
        lines(
            "Evaluation sets",
            "Reward of each set at its latest evaluation; without evaluation.sets, a mix has one for each task.",
            (f"max by (set) (scalerl_coordinator_evaluation_set_reward{{{RUN}}})", "{{set}}"),
            maximum=1.0,
            minimum=None,
        ),
        lines(
            "Filtered groups",
            "Fraction of the latest step's groups without a gradient. A task that is solved, or hopeless, approaches 1.",
            (f"{of_task('filtered_groups')} / {of_task('groups')}", "{{task}}"),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Mean completion length",
            "Tokens of the latest step's completions.",
            (of_task("mean_completion_tokens"), "{{task}}"),
        ),
        lines(
            "Truncated completions",
            "Fraction of the latest step's completions that ended at their maximum length.",
            (of_task("truncated_fraction"), "{{task}}"),
            unit="percentunit",
            maximum=1.0,
        ),
    ),
)

POLICY = Section(
    "Health",
    (
        lines(
            "Staleness",
            "Steps between sampling and training of a token, in the latest step, and the maximum allowed.",
            (stat_of("staleness_mean"), "mean"),
            (stat_of("staleness_max"), "oldest"),
            (newest("scalerl_coordinator_staleness_bound_steps"), "allowed"),
        ),
        by_position(
            "Mismatch: sampled",
            "KL estimate of trainer against generators by a token's position, on tokens sampled and trained with "
            "the same weights. It must not grow with the position.",
            "sampled",
        ),
        by_position(
            "Mismatch: probe",
            "The same on sequences that one generator rescores after a publish.",
            "probe",
        ),
        by_position(
            "Ratio",
            "The same on all trained tokens: numerical mismatch and staleness combined.",
            "ratio",
        ),
        lines(
            "Largest ratio", "Maximum over the tokens of the latest step.", (stat_of("ratio_max"), "ratio")
        ),
        lines(
            "Tokens with extreme ratios",
            "Fraction of the latest step's tokens with a ratio above 10 or below 1/10. Above 10 % the step is skipped.",
            (stat_of("ratio_beyond_fraction"), "share"),
            unit="percentunit",
        ),
        lines(
            "Skipped steps",
            "Updates not applied: loss or gradient not finite, or exploding ratios.",
            (f"sum(increase(scalerl_coordinator_skipped_steps_total{{{RUN}}}[$__rate_interval]))", "steps"),
        ),
        lines("Loss", "Latest step.", (stat_of("loss"), "loss"), minimum=None),
        lines("Gradient norm", "Before clipping.", (stat_of("grad_norm"), "norm")),
        lines("Entropy", "Of the policy, in nats per token.", (stat_of("entropy"), "entropy")),
        lines(
            "KL to the reference",
            "Mean estimate over the latest step's tokens, in nats per token; only with recipe.kl.penalty.",
            (stat_of("reference_kl"), "estimate"),
            minimum=None,
        ),
        lines(
            "KL to the teacher",
            "Mean estimate over the latest step's tokens, in nats per token; only with recipe.distillation. Unanswered: failed "
            "requests to the teacher, whose groups wait.",
            (stat_of("teacher_kl"), "estimate"),
            (f"sum(increase(scalerl_actor_teacher_failures_total{{{RUN}}}[$__rate_interval]))", "unanswered"),
            minimum=None,
        ),
        lines(
            "Truncated",
            "Fraction of completions truncated at the length limit. Above 10 % precedes collapse, below 5 % is healthy. "
            "Interrupted: reasoning ended by recipe.length.interruption.",
            (
                f"{rate('scalerl_actor_truncated_rollouts_total')} / {rate('scalerl_actor_rollouts_total')}",
                "truncated",
            ),
            (
                f"{rate('scalerl_actor_interrupted_rollouts_total')} / {rate('scalerl_actor_rollouts_total')}",
                "interrupted",
            ),
            unit="percentunit",
        ),
        lines("Completion length", "Mean of the latest step.", (stat_of("completion_tokens_mean"), "tokens")),
        lines(
            "Degenerate completions",
            "Of the latest step: completions that end in a loop, that have no answer, and that are distinct within their group.",
            (of_task("looped_fraction"), "{{task}}: end in a loop"),
            (of_task("unanswered_fraction"), "{{task}}: no answer"),
            (of_task("distinct_fraction"), "{{task}}: distinct"),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Episodes solved, by turn",
            "With an environment: part of the graded episodes of the latest step that score 1 with their first, second, third, or a later reply.",
            *((of_task(f"solved_at_turn_{turn}"), f"{{{{task}}}}: turn {turn}") for turn in (1, 2, 3, 4)),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Environment",
            "Of the episodes of the latest step: tokens of the environment, time in its steps, and malformed calls of tools.",
            (of_task("environment_tokens_fraction"), "{{task}}: tokens"),
            (of_task("environment_seconds_fraction"), "{{task}}: time"),
            (of_task("malformed_calls_fraction"), "{{task}}: malformed calls"),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Filtered",
            "Fraction of prompts whose completions all have the same reward and provide no gradient.",
            (stat_of("filtered_fraction"), "share"),
            unit="percentunit",
            maximum=1.0,
        ),
    ),
)

ROLLOUTS = Section(
    "Rollouts",
    (
        lines(
            "By outcome",
            "Trained, filtered, given up, skipped, queued, leased.",
            (f"max by (outcome) (scalerl_coordinator_rollouts{{{RUN}}})", "{{outcome}}"),
        ),
        lines(
            "Dropped",
            "Rejected rollouts, by reason.",
            (rate("scalerl_coordinator_dropped_rollouts_total", "reason"), "{{reason}}"),
            unit="cps",
        ),
        lines(
            "Given up",
            "Fraction of the last half hour's slots that were given up: prompt too long for the context, or repeated failures.",
            (
                f"sum by (why) (increase(scalerl_coordinator_given_up_slots_total{{{RUN}}}[30m])) / ignoring (why) "
                f"group_left () sum (increase(scalerl_coordinator_closed_slots_total{{{RUN}}}[30m]))",
                "{{why}}",
            ),
            unit="percentunit",
        ),
        lines(
            "Expired leases, failures",
            "Leases reassigned to other generators; groups that could not be generated; completions without a verdict; "
            "tokens without a log-probability. The last three are excluded from training.",
            (rate("scalerl_coordinator_expired_leases_total"), "expired leases"),
            (rate("scalerl_coordinator_timed_out_leases_total"), "of those, no progress for 30 minutes"),
            (rate("scalerl_actor_failed_groups_total"), "failed groups"),
            (rate("scalerl_actor_masked_tokens_total"), "masked tokens"),
            (rate("scalerl_actor_grading_errors_total"), "verifier failures"),
            unit="cps",
        ),
    ),
)

TRAINER = Section(
    "Trainer",
    (
        Panel(
            "Time by phase",
            "Fraction of wall-clock time, rank 0.",
            (Query(rate("scalerl_trainer_seconds_total", "phase"), "{{phase}}"),),
            "percentunit",
            "stacked",
        ),
        quantiles(
            "Step",
            "From the arrival of the batch to the applied update, without waiting.",
            "scalerl_trainer_step_seconds",
            RUN,
        ),
        quantiles(
            "Publish",
            "Transfer of the weights from the trainer to all generators.",
            "scalerl_trainer_publish_seconds",
            RUN,
        ),
        lines(
            "Publishes and checkpoints",
            "By outcome.",
            (rate("scalerl_trainer_publishes_total", "outcome"), "publish {{outcome}}"),
            (rate("scalerl_trainer_checkpoints_total", "outcome"), "checkpoint {{outcome}}"),
            unit="cps",
        ),
        lines(
            "Versions",
            "Applied by the trainer, published, and held by each generator.",
            (newest("scalerl_trainer_version"), "trained"),
            (newest("scalerl_trainer_published_version"), "published"),
            (f"max by (pod) (scalerl_actor_weight_version{{{RUN}}})", "{{pod}}"),
            minimum=None,
        ),
        lines("Learning rate", "Latest step.", (stat_of("learning_rate"), "learning rate")),
    ),
)

PROCESSES = Section(
    "Processes",
    (
        lines(
            "Memory",
            "Resident memory of each process of the run, without the vLLM servers.",
            (f"max by (role, pod) (process_resident_memory_bytes{{{RUN}}})", "{{role}} {{pod}}"),
            unit="bytes",
        ),
        lines(
            "CPU",
            "Cores used by each process.",
            (
                f"sum by (role, pod) (rate(process_cpu_seconds_total{{{RUN}}}[$__rate_interval]))",
                "{{role}} {{pod}}",
            ),
        ),
        lines(
            "Open files",
            "File descriptors; steady growth indicates a leak.",
            (f"max by (role, pod) (process_open_fds{{{RUN}}})", "{{role}} {{pod}}"),
        ),
    ),
)

GENERATORS = Section(
    "Generators",
    (
        lines(
            "Tokens",
            "Sampled per second, by generator.",
            (rate("scalerl_actor_tokens_total", "pod"), "{{pod}}"),
            unit="tps",
        ),
        lines(
            "Busy",
            "Fraction of time with a request in flight.",
            (rate("scalerl_actor_busy_seconds_total", "pod"), "{{pod}}"),
            unit="percentunit",
        ),
        lines(
            "In flight",
            "Groups in flight at the server.",
            (f"max by (pod) (scalerl_actor_in_flight_groups{{{RUN}}})", "{{pod}}"),
        ),
        quantiles(
            "Generation",
            "From the request to the last token of a group.",
            "scalerl_actor_generation_seconds",
            RUN,
        ),
        quantiles(
            "Weight update", "Duration per generator, by phase.", "scalerl_actor_update_seconds", RUN, "phase"
        ),
        quantiles("Grading", "Duration of grading a group.", "scalerl_actor_grading_seconds", RUN),
        Panel(
            "Staleness of groups",
            "Weight versions between the oldest token of a group and the weights when it was complete.",
            (Query(rate("scalerl_actor_lease_staleness_versions_bucket", "le"), "{{le}}"),),
            "short",
            "heat",
        ),
        lines(
            "Failures and recovery",
            "Lost servers and coordinators, failed updates, resubmitted requests; tokens of unfinished completions resumed on a "
            "restarted server, or taken over from another generator; leases whose partial completions were discarded.",
            (rate("scalerl_actor_server_losses_total"), "server lost"),
            (rate("scalerl_actor_coordinator_losses_total"), "coordinator lost"),
            (rate("scalerl_actor_update_failures_total"), "update failed"),
            (rate("scalerl_actor_resubmitted_requests_total"), "resubmitted"),
            (rate("scalerl_actor_resumed_tokens_total"), "tokens resumed"),
            (rate("scalerl_actor_handed_over_tokens_total"), "tokens taken over"),
            (rate("scalerl_actor_dropped_partials_total"), "partials discarded"),
            unit="cps",
        ),
        lines(
            "Group occupancy",
            "Mean fraction of a group's sequences that are still generating; low values indicate stragglers.",
            (f"max by (pod) (scalerl_actor_group_occupancy{{{RUN}}})", "{{pod}}"),
            unit="percentunit",
        ),
    ),
)

COORDINATOR = Section(
    "Coordinator",
    (
        lines(
            "Requests",
            "By status code.",
            (rate("scalerl_coordinator_requests_total", "code"), "{{code}}"),
            unit="reqps",
        ),
        quantiles(
            "Latency",
            "Seconds, by path; lease, next and begin are long polls that wait for work.",
            "scalerl_coordinator_request_seconds",
            RUN,
            "path",
        ),
        lines(
            "Received",
            "Request bodies.",
            (rate("scalerl_coordinator_received_bytes_total"), "bytes"),
            unit="Bps",
        ),
        lines(
            "Journal",
            "Duration of a group commit, in seconds.",
            (
                f"{rate('scalerl_coordinator_journal_sync_seconds_total')} / {rate('scalerl_coordinator_journal_syncs_total')}",
                "per sync",
            ),
            unit="s",
        ),
        lines(
            "Journal written",
            "To segments.",
            (rate("scalerl_coordinator_journal_bytes_total"), "bytes"),
            unit="Bps",
        ),
        lines(
            "Disk",
            "1 while the journal cannot be written; failed checkpoints.",
            (newest("scalerl_coordinator_journal_refusing"), "journal refuses"),
            (
                f"sum(increase(scalerl_coordinator_checkpoint_failures_total{{{RUN}}}[$__rate_interval]))",
                "checkpoints failed",
            ),
        ),
        lines(
            "Past responses",
            "Stored for drafts (generator.speculation.history), dropped by reason, and prompts looked up by result; per second.",
            (rate("scalerl_coordinator_history_responses_total"), "stored"),
            (rate("scalerl_coordinator_history_dropped_responses_total", "reason"), "dropped: {{reason}}"),
            (rate("scalerl_coordinator_history_lookups_total", "result"), "lookups: {{result}}"),
        ),
        lines(
            "Exports",
            "Models written to the volume and copied to trainer.export.to, by outcome; failures are retried.",
            (
                f"sum by (operation, outcome) (increase(scalerl_trainer_exports_total{{{RUN}}}[$__rate_interval]))",
                "{{operation}} {{outcome}}",
            ),
            (newest("scalerl_trainer_export_version"), "newest version"),
        ),
        lines(
            "Experiment trackers",
            "Latest step delivered, and failed attempts, which are retried.",
            (f"max by (tracker) (scalerl_coordinator_tracker_step{{{RUN}}})", "{{tracker}}"),
            (
                f"sum by (tracker) (increase(scalerl_coordinator_tracker_failures_total{{{RUN}}}[$__rate_interval]))",
                "{{tracker}} failed",
            ),
        ),
    ),
)

BOARD = Board(
    uid="scalerl-run",
    title="ScaleRL / run",
    description="One run, from its curve to its disk.",
    sections=(CURVE, AHEAD, TASKS, POLICY, ROLLOUTS, TRAINER, GENERATORS, COORDINATOR, PROCESSES),
    variables=(
        Variable("namespace", operator.RUN_PHASE),
        Variable("run", f'{operator.RUN_PHASE}{{namespace="$namespace"}}'),
    ),
    links=(("Fleet", "scalerl-fleet"), ("Operator", "scalerl-operator")),
)
