"""Comparison of all runs."""

from __future__ import annotations

from panels import Board, Panel, Query, Section, Variable, lines, number

from scalerl_api import operator_metric_names as operator

HERE = 'namespace=~"$namespace"'


def each(expr: str) -> str:
    """One series a run."""
    return f"max by (namespace, run) ({expr})"


def rate(counter: str) -> str:
    """Increase a second of each run."""
    return f"sum by (namespace, run) (rate({counter}{{{HERE}}}[$__rate_interval]))"


NAME = "{{namespace}}/{{run}}"

NOW = Section(
    "Now",
    (
        number(
            "Running",
            "Runs in the phase `running`.",
            f'count(max by (namespace, run) (scalerl_coordinator_phase{{{HERE}, phase="running"}} == 1)) or vector(0)',
        ),
        number(
            "Waiting",
            "Runs without a generator that holds weights.",
            f'count(max by (namespace, run) (scalerl_coordinator_phase{{{HERE}, phase="waiting"}} == 1)) or vector(0)',
        ),
        number(
            "Generators",
            "Registered with their coordinators.",
            f"sum({each(f'scalerl_coordinator_members{{{HERE}}}')})",
        ),
        number(
            "Tokens generated",
            "Per second, over all generators.",
            f"sum({rate('scalerl_actor_tokens_total')})",
            unit="tps",
        ),
        number(
            "Tokens trained",
            "Per second, over all trainers.",
            f"sum({rate('scalerl_trainer_tokens_total')})",
            unit="tps",
        ),
        number(
            "Devices in use",
            "Device-seconds per second, over all runs.",
            f"sum({rate('scalerl_coordinator_device_seconds_total')})",
        ),
        Panel(
            "Runs",
            "State of each run, also of those without pods; a run's name links to its dashboard.",
            (
                Query(
                    f"max by (namespace, run, phase, reason) ({operator.RUN_PHASE}{{{HERE}}})", unit="hidden"
                ),
                Query(each(f"{operator.RUN_STEP}{{{HERE}}}"), "step"),
                Query(each(f"{operator.RUN_MAX_STEPS}{{{HERE}}}"), "of"),
                Query(each(f"{operator.RUN_BUDGET_USED}{{{HERE}}}"), "budget used", "percentunit"),
                Query(f"{each(f'{operator.RUN_ESTIMATED_END}{{{HERE}}}')} - time()", "left", "s"),
                Query(each(f"scalerl_coordinator_evaluation_reward{{{HERE}}}"), "reward"),
                Query(each(f'{operator.RUN_FORECAST_REWARD}{{{HERE}, bound="median"}}'), "forecast"),
                Query(each(f'{operator.RUN_FORECAST_ASYMPTOTE}{{{HERE}, bound="median"}}'), "asymptote"),
                Query(f"max by (namespace, run, state) ({operator.RUN_DECISION}{{{HERE}}})", "", "hidden"),
                Query(each(f"scalerl_coordinator_members{{{HERE}}}"), "generators"),
                Query(each(f"scalerl_coordinator_generator_busy_fraction{{{HERE}}}"), "generators busy"),
                Query(each(f"scalerl_coordinator_trainer_busy_fraction{{{HERE}}}"), "trainer busy"),
                Query(
                    f"{each(f'scalerl_coordinator_device_seconds_total{{{HERE}}}')} / 3600", "device-hours"
                ),
            ),
            kind="rows",
            width=24,
            height=12,
        ),
    ),
)

AHEAD = Section(
    "Forecast and budget",
    (
        lines(
            "Runs by phase",
            "As last reconciled by the operator.",
            (
                f"count by (phase) (max by (namespace, run, phase) ({operator.RUN_PHASE}{{{HERE}}}))",
                "{{phase}}",
            ),
        ),
        lines(
            "Budget used",
            "Of the limit that is nearest.",
            (each(f"{operator.RUN_BUDGET_USED}{{{HERE}}}"), NAME),
            unit="percentunit",
        ),
        lines(
            "Time left",
            "Until the first limit of the budget, at the pace of the latest evaluations.",
            (f"{each(f'{operator.RUN_ESTIMATED_END}{{{HERE}}}')} - time()", NAME),
            unit="s",
        ),
        lines(
            "Forecast",
            "Reward predicted at the horizon, median. Not comparable between tasks.",
            (each(f'{operator.RUN_FORECAST_REWARD}{{{HERE}, bound="median"}}'), NAME),
            minimum=None,
            maximum=1.0,
        ),
        lines(
            "Expected gain",
            "Gain of reward from now to the horizon, median.",
            (each(f'{operator.RUN_FORECAST_GAIN}{{{HERE}, bound="median"}}'), NAME),
            minimum=None,
        ),
        lines(
            "Votes for a stop",
            "Consecutive evaluations, as a share of autoscaling.stopAfter; from 1 on, a stop is decided.",
            (
                f"{each(f'{operator.RUN_STOP_VOTES}{{{HERE}}}')} / {each(f'{operator.RUN_STOP_VOTES_NEEDED}{{{HERE}}}')}",
                NAME,
            ),
        ),
    ),
)

COMPARED = Section(
    "Comparison",
    (
        lines(
            "Reward",
            "Held-out reward at the latest evaluation. Not comparable between tasks.",
            (each(f"scalerl_coordinator_evaluation_reward{{{HERE}}}"), NAME),
            width=12,
            maximum=1.0,
            minimum=None,
        ),
        lines(
            "Step",
            "Steps trained; a flat line means no progress.",
            (each(f"scalerl_coordinator_step{{{HERE}}}"), NAME),
            width=12,
        ),
        lines("Tokens generated", "Per second.", (rate("scalerl_actor_tokens_total"), NAME), unit="tps"),
        lines("Tokens trained", "Per second.", (rate("scalerl_trainer_tokens_total"), NAME), unit="tps"),
        lines(
            "Devices", "Device-seconds per second.", (rate("scalerl_coordinator_device_seconds_total"), NAME)
        ),
        lines(
            "Generators busy",
            "Fraction of the run with a request in flight.",
            (each(f"scalerl_coordinator_generator_busy_fraction{{{HERE}}}"), NAME),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Trainer busy",
            "Fraction of the run spent computing.",
            (each(f"scalerl_coordinator_trainer_busy_fraction{{{HERE}}}"), NAME),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Mismatch",
            "KL estimate of trainer against generators on tokens sampled and trained at one version; above "
            "0.01 indicates a mismatch.",
            (each(f'scalerl_coordinator_mismatch_kl{{{HERE}, source="sampled", positions="all"}}'), NAME),
            minimum=None,
        ),
    ),
)

BOARD = Board(
    uid="scalerl-fleet",
    title="ScaleRL / fleet",
    description="Comparison of all runs.",
    sections=(NOW, AHEAD, COMPARED),
    variables=(Variable("namespace", operator.RUN_PHASE, many=True),),
    links=(("Run", "scalerl-run"), ("Operator", "scalerl-operator")),
)
