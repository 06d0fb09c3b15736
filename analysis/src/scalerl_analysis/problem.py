"""The error for files that cannot be analysed, and for arguments that do not fit them."""

from __future__ import annotations


class AnalysisProblem(ValueError):
    """The input is invalid. The message has the file, the line or column if known, and what to do. Nothing was written.

    Parameters of the functions are in backticks (`scale`).
    """
