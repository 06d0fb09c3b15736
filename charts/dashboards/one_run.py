"""One run, from its curve down to its disk."""

from __future__ import annotations

from panels import Board, Panel, Query, Section, Variable, lines, number, quantiles

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


CURVE = Section(
    "How far it is",
    (
        number(
            "Reward",
            "Held-out reward at the newest evaluation.",
            newest("scalerl_coordinator_evaluation_reward"),
        ),
        number("Step", "Steps trained.", newest("scalerl_coordinator_step")),
        number("Generators", "Registered with the coordinator.", newest("scalerl_coordinator_members")),
        number(
            "Device-hours",
            "Devices times time, over all lives of the run.",
            f"max(scalerl_coordinator_device_seconds_total{{{RUN}}}) / 3600",
        ),
        number(
            "Last checkpoint",
            "Step of the newest checkpoint on disk.",
            newest("scalerl_trainer_checkpoint_step"),
        ),
        number(
            "Mismatch",
            "KL estimate of trainer against generators on tokens sampled and trained at one version; above 0.01 they "
            "disagree.",
            newest("scalerl_coordinator_mismatch_kl", 'source="sampled", positions="all"'),
        ),
        lines(
            "Reward",
            "Held-out reward of each evaluation, and the mean reward of what is trained on.",
            (newest("scalerl_coordinator_evaluation_reward"), "held out"),
            (stat_of("reward_mean"), "trained on"),
            width=12,
            maximum=1.0,
            minimum=None,
        ),
        lines(
            "Tokens",
            "Sampled by generators; trained on (those with a gradient).",
            (rate("scalerl_actor_tokens_total"), "generated"),
            (rate("scalerl_trainer_tokens_total"), "trained"),
            unit="tps",
            width=6,
        ),
        lines(
            "Busy",
            "Over the run: generators with a request in flight, trainer computing. The lower one waits for the other.",
            (newest("scalerl_coordinator_generator_busy_fraction"), "generators"),
            (newest("scalerl_coordinator_trainer_busy_fraction"), "trainer"),
            unit="percentunit",
            width=6,
            maximum=1.0,
        ),
    ),
)

POLICY = Section(
    "Is it healthy",
    (
        lines(
            "Staleness",
            "Steps between sampling and training of a token, in the newest step, and the most that is allowed.",
            (stat_of("staleness_mean"), "mean"),
            (stat_of("staleness_max"), "oldest"),
            (newest("scalerl_coordinator_staleness_bound_steps"), "allowed"),
        ),
        by_position(
            "Mismatch: sampled",
            "KL estimate of trainer against generators by a token's position, on tokens that the weights sampled which "
            "train on them. It must not grow with the position.",
            "sampled",
        ),
        by_position(
            "Mismatch: probe",
            "The same on sequences that one generator scores again after a publish.",
            "probe",
        ),
        by_position(
            "Ratio",
            "The same on all trained tokens: numerical differences and staleness together.",
            "ratio",
        ),
        lines("Largest ratio", "Of any token of the newest step.", (stat_of("ratio_max"), "ratio")),
        lines(
            "Beyond the ratio",
            "Share of the newest step's tokens with a ratio beyond 10 either way. Above 10 % a step is skipped.",
            (stat_of("ratio_beyond_fraction"), "share"),
            unit="percentunit",
        ),
        lines(
            "Skipped steps",
            "Not applied: loss or gradient not finite, or ratios that exploded.",
            (f"sum(increase(scalerl_coordinator_skipped_steps_total{{{RUN}}}[$__rate_interval]))", "steps"),
        ),
        lines("Loss", "Of the newest step.", (stat_of("loss"), "loss"), minimum=None),
        lines("Gradient norm", "Before clipping.", (stat_of("grad_norm"), "norm")),
        lines("Entropy", "Of the policy, in nats a token.", (stat_of("entropy"), "entropy")),
        lines(
            "Cut off",
            "Share of completions cut at the length limit. Above 10 % precedes collapse, below 5 % is healthy. Interrupted: "
            "whose thought was ended by recipe.length.interruption.",
            (
                f"{rate('scalerl_actor_truncated_rollouts_total')} / {rate('scalerl_actor_rollouts_total')}",
                "cut off",
            ),
            (
                f"{rate('scalerl_actor_interrupted_rollouts_total')} / {rate('scalerl_actor_rollouts_total')}",
                "interrupted",
            ),
            unit="percentunit",
        ),
        lines("Completion length", "Mean of the newest step.", (stat_of("completion_tokens_mean"), "tokens")),
        lines(
            "Filtered",
            "Share of prompts whose completions all score alike, so that nothing is learnt from them.",
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
            "By fate",
            "Trained, filtered, given up, of skipped steps, queued for a step, leased.",
            (f"max by (fate) (scalerl_coordinator_rollouts{{{RUN}}})", "{{fate}}"),
        ),
        lines(
            "Dropped",
            "Not accepted, by reason.",
            (rate("scalerl_coordinator_dropped_rollouts_total", "reason"), "{{reason}}"),
            unit="cps",
        ),
        lines(
            "Given up",
            "Share of the last half hour's slots that train nothing: their prompt is too long for the context, or failed again and again.",
            (
                f"sum by (why) (increase(scalerl_coordinator_given_up_slots_total{{{RUN}}}[30m])) / ignoring (why) "
                f"group_left () sum (increase(scalerl_coordinator_closed_slots_total{{{RUN}}}[30m]))",
                "{{why}}",
            ),
            unit="percentunit",
        ),
        lines(
            "Expired leases, failures",
            "Work that had to be given to someone else; groups that could not be generated; completions without a "
            "verdict; tokens without a log-probability. None of the latter three is trained on.",
            (rate("scalerl_coordinator_expired_leases_total"), "expired leases"),
            (rate("scalerl_coordinator_timed_out_leases_total"), "of those, no token for leaseSeconds"),
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
            "Where a second goes",
            "Share of wall time by phase, rank 0.",
            (Query(rate("scalerl_trainer_seconds_total", "phase"), "{{phase}}"),),
            "percentunit",
            "stacked",
        ),
        quantiles(
            "Step",
            "From the batch's arrival to the applied update, without waiting.",
            "scalerl_trainer_step_seconds",
            RUN,
        ),
        quantiles(
            "Publish", "Weights from the trainer into all generators.", "scalerl_trainer_publish_seconds", RUN
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
        lines("Learning rate", "Of the newest step.", (stat_of("learning_rate"), "learning rate")),
    ),
)

PROCESSES = Section(
    "Processes",
    (
        lines(
            "Memory",
            "Resident memory of each process of the run; vLLM's servers are not among them.",
            (f"max by (role, pod) (process_resident_memory_bytes{{{RUN}}})", "{{role}} {{pod}}"),
            unit="bytes",
        ),
        lines(
            "CPU",
            "Cores in use by each process.",
            (
                f"sum by (role, pod) (rate(process_cpu_seconds_total{{{RUN}}}[$__rate_interval]))",
                "{{role}} {{pod}}",
            ),
        ),
        lines(
            "Open files",
            "File descriptors: a count that only grows is a leak.",
            (f"max by (role, pod) (process_open_fds{{{RUN}}})", "{{role}} {{pod}}"),
        ),
    ),
)

GENERATORS = Section(
    "Generators",
    (
        lines(
            "Tokens",
            "Sampled a second, by generator.",
            (rate("scalerl_actor_tokens_total", "pod"), "{{pod}}"),
            unit="tps",
        ),
        lines(
            "Busy",
            "Share of time with a request in flight.",
            (rate("scalerl_actor_busy_seconds_total", "pod"), "{{pod}}"),
            unit="percentunit",
        ),
        lines(
            "In flight",
            "Groups at the server.",
            (f"max by (pod) (scalerl_actor_in_flight_groups{{{RUN}}})", "{{pod}}"),
        ),
        quantiles(
            "Generation", "From request to last token of a group.", "scalerl_actor_generation_seconds", RUN
        ),
        quantiles(
            "Weight update", "As a generator sees it, by phase.", "scalerl_actor_update_seconds", RUN, "phase"
        ),
        quantiles("Grading", "Scoring of a group.", "scalerl_actor_grading_seconds", RUN),
        Panel(
            "Staleness of groups",
            "Weight versions between a group's oldest token and the weights held when it was done.",
            (Query(rate("scalerl_actor_lease_staleness_versions_bucket", "le"), "{{le}}"),),
            "short",
            "heat",
        ),
        lines(
            "Trouble",
            "Servers found dead, coordinators lost, updates failed, requests sent again; tokens of unfinished completions "
            "that continued on a restarted server.",
            (rate("scalerl_actor_server_losses_total"), "server lost"),
            (rate("scalerl_actor_coordinator_losses_total"), "coordinator lost"),
            (rate("scalerl_actor_update_failures_total"), "update failed"),
            (rate("scalerl_actor_resubmitted_requests_total"), "sent again"),
            (rate("scalerl_actor_resumed_tokens_total"), "tokens continued"),
            unit="cps",
        ),
        lines(
            "Group occupancy",
            "Mean share of a group's sequences that still grow: low means stragglers.",
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
            "Answers",
            "Seconds to an answer, by path; the long polls of lease, next and begin wait for work.",
            "scalerl_coordinator_request_seconds",
            RUN,
            "path",
        ),
        lines(
            "Received",
            "Bodies of requests.",
            (rate("scalerl_coordinator_received_bytes_total"), "bytes"),
            unit="Bps",
        ),
        lines(
            "Journal",
            "Seconds a group commit takes.",
            (
                f"{rate('scalerl_coordinator_journal_sync_seconds_total')} / {rate('scalerl_coordinator_journal_syncs_total')}",
                "a sync",
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
            "1 while the journal takes nothing; checkpoints that could not be written.",
            (newest("scalerl_coordinator_journal_refusing"), "journal refuses"),
            (
                f"sum(increase(scalerl_coordinator_checkpoint_failures_total{{{RUN}}}[$__rate_interval]))",
                "checkpoints failed",
            ),
        ),
        lines(
            "Exports",
            "Models written to the volume and copied elsewhere, with those that failed; they are tried again.",
            (
                f"sum by (operation, outcome) (increase(scalerl_trainer_exports_total{{{RUN}}}[$__rate_interval]))",
                "{{operation}} {{outcome}}",
            ),
            (newest("scalerl_trainer_export_version"), "newest version"),
        ),
        lines(
            "Experiment trackers",
            "Newest step that each was given, and attempts that failed; they are tried again.",
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
    description="One run, from its curve down to its disk.",
    sections=(CURVE, POLICY, ROLLOUTS, TRAINER, GENERATORS, COORDINATOR, PROCESSES),
    variables=(
        Variable("namespace", "scalerl_coordinator_step"),
        Variable("run", 'scalerl_coordinator_step{namespace="$namespace"}'),
    ),
    links=(("Fleet", "scalerl-fleet"), ("Operator", "scalerl-operator")),
)
