"""The alternatives of a recipe's sections of which at most one is given: losses, corrections, curricula, length rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ONE_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "loss": ("cispo", "ppoClip", "gspo", "reinforce", "dppo", "plugin"),
    "correction": ("none", "truncated", "masked"),
    "kl": ("none", "penalty"),
    "offPolicy": ("pipeline", "ppo"),
    "curriculum": (
        *("uniform", "noPositiveResampling", "passRateBand", "difficultyPools"),
        *("edgeOfCompetence", "sec"),
    ),
    "length": ("none", "interruption", "penalty", "overlong"),
}
"""Alternatives of each one-of section: one that the manifest gives replaces the preset's."""
