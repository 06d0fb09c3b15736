"""What is wrong with the input, in one line."""

from __future__ import annotations


class CurveProblem(Exception):
    """Names the file, the line or column where there is one, and what to do. Nothing was written."""
