"""What may go wrong on the way to a cluster."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """A cluster, a program of it or an image could not be made, or not ended."""


class MissingError(ClusterError):
    """This machine lacks what a cluster needs; the message says what to install or set."""


class EndedError(ClusterError):
    """A command was ended because what was done at the same time failed."""
