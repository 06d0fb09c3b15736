"""Runs a command for clusters."""

from __future__ import annotations

import argparse
from importlib import import_module

from scalerl_cli.clusters.session import explained, open_session
from scalerl_operator.kube import errors


def run_cluster_command(arguments: argparse.Namespace) -> int:
    """The exit code of ``get``, ``why``, ``logs``, ``fetch``, ``submit`` or ``fork``: each has a module of its name."""
    name = arguments.command
    module = import_module(f"scalerl_cli.clusters.{name}")
    try:
        code: int = getattr(module, name)(open_session(arguments), arguments)
    except errors.ApiError as error:
        raise explained(error) from error
    return code
