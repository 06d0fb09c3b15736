"""The error for invalid input files and options."""

from __future__ import annotations


class CurveProblem(Exception):
    """The input is invalid. The message has the file, the line or column if known, and what to do. Nothing was written."""
