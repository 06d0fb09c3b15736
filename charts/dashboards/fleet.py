"""Comparison of all runs."""

from __future__ import annotations

from panels import Board, Panel, Query, Section, Variable, lines, number

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
            "State of each run.",
            (
                Query(each(f"scalerl_coordinator_step{{{HERE}}}"), "step"),
                Query(each(f"scalerl_coordinator_evaluation_reward{{{HERE}}}"), "reward"),
                Query(each(f"scalerl_coordinator_members{{{HERE}}}"), "generators"),
                Query(each(f"scalerl_coordinator_generator_busy_fraction{{{HERE}}}"), "generators busy"),
                Query(each(f"scalerl_coordinator_trainer_busy_fraction{{{HERE}}}"), "trainer busy"),
                Query(
                    f"{each(f'scalerl_coordinator_device_seconds_total{{{HERE}}}')} / 3600", "device-hours"
                ),
            ),
            kind="rows",
            width=24,
            height=9,
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
    sections=(NOW, COMPARED),
    variables=(Variable("namespace", "scalerl_coordinator_step", many=True),),
    links=(("Run", "scalerl-run"), ("Operator", "scalerl-operator")),
)
