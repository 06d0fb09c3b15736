"""The error for invalid input files and options."""

from __future__ import annotations

from scalerl_cli.exits import Refused


class CurveProblem(Refused):
    """The input is invalid. The message has the file, the line or column if known, and what to do. Nothing was written."""
