"""Runs a command for clusters, and prints its error."""

from __future__ import annotations

import argparse

from scalerl_cli.clusters.session import Trouble, explained, open_session
from scalerl_cli.output import say
from scalerl_operator.kube import errors


def run_cluster_command(arguments: argparse.Namespace) -> int:
    """The exit code of ``get``, ``why``, ``logs``, ``fetch``, ``submit`` or ``fork``."""
    try:
        session = open_session(arguments)
        if arguments.command == "get":
            from scalerl_cli.clusters.get import get as command
        elif arguments.command == "why":
            from scalerl_cli.clusters.why import why as command
        elif arguments.command == "logs":
            from scalerl_cli.clusters.logs import logs as command
        elif arguments.command == "fetch":
            from scalerl_cli.clusters.fetch import fetch as command
        elif arguments.command == "fork":
            from scalerl_cli.clusters.fork import fork as command
        else:
            from scalerl_cli.clusters.submit import submit as command
        return command(session, arguments)
    except errors.ApiError as error:
        trouble = explained(error)
    except Trouble as error:
        trouble = error
    say(str(trouble), error=True)
    return trouble.code
