"""All runs beside each other."""

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
            "Runs at work",
            "Coordinators whose run is in its phase `running`.",
            f'count(max by (namespace, run) (scalerl_coordinator_phase{{{HERE}, phase="running"}} == 1)) or vector(0)',
        ),
        number(
            "Runs that wait",
            "No generator of theirs holds weights yet.",
            f'count(max by (namespace, run) (scalerl_coordinator_phase{{{HERE}, phase="waiting"}} == 1)) or vector(0)',
        ),
        number(
            "Generators",
            "Registered with their coordinators.",
            f"sum({each(f'scalerl_coordinator_members{{{HERE}}}')})",
        ),
        number(
            "Tokens generated",
            "A second, by all generators.",
            f"sum({rate('scalerl_actor_tokens_total')})",
            unit="tps",
        ),
        number(
            "Tokens trained",
            "A second, by all trainers.",
            f"sum({rate('scalerl_trainer_tokens_total')})",
            unit="tps",
        ),
        number(
            "Devices at work",
            "Device-seconds that all runs take a second.",
            f"sum({rate('scalerl_coordinator_device_seconds_total')})",
        ),
        Panel(
            "Runs",
            "Where each run stands.",
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
    "Beside each other",
    (
        lines(
            "Reward",
            "Held-out reward at the newest evaluation. Runs on different tasks do not compare.",
            (each(f"scalerl_coordinator_evaluation_reward{{{HERE}}}"), NAME),
            width=12,
            maximum=1.0,
            minimum=None,
        ),
        lines(
            "Step",
            "Steps trained; a flat line stands still.",
            (each(f"scalerl_coordinator_step{{{HERE}}}"), NAME),
            width=12,
        ),
        lines("Tokens generated", "A second.", (rate("scalerl_actor_tokens_total"), NAME), unit="tps"),
        lines("Tokens trained", "A second.", (rate("scalerl_trainer_tokens_total"), NAME), unit="tps"),
        lines(
            "Devices", "Device-seconds a second.", (rate("scalerl_coordinator_device_seconds_total"), NAME)
        ),
        lines(
            "Generators busy",
            "Over the run, with a request in flight.",
            (each(f"scalerl_coordinator_generator_busy_fraction{{{HERE}}}"), NAME),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Trainer busy",
            "Over the run.",
            (each(f"scalerl_coordinator_trainer_busy_fraction{{{HERE}}}"), NAME),
            unit="percentunit",
            maximum=1.0,
        ),
        lines(
            "Mismatch",
            "KL estimate of trainer against generators on tokens sampled and trained at one version; above 0.01 they "
            "disagree.",
            (each(f'scalerl_coordinator_mismatch_kl{{{HERE}, source="sampled", positions="all"}}'), NAME),
            minimum=None,
        ),
    ),
)

BOARD = Board(
    uid="scalerl-fleet",
    title="ScaleRL / fleet",
    description="All runs beside each other.",
    sections=(NOW, COMPARED),
    variables=(Variable("namespace", "scalerl_coordinator_step", many=True),),
    links=(("Run", "scalerl-run"), ("Operator", "scalerl-operator")),
)
