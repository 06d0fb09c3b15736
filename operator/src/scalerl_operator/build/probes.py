"""Probes: a plan's, as a kubelet makes them."""

from __future__ import annotations

import math
from typing import Final

from scalerl_operator.names import PORTS
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Container, Probe

HTTP_PERIOD_SECONDS: Final = 5
EXEC_PERIOD_SECONDS: Final = 10
"""A probe by command is a process each time."""
READINESS_FAILURES: Final = 3
"""One late answer of a busy process must not make its pod count as unavailable, and hold up a node's drain."""
_START_SECONDS = 5
"""For the interpreter of a probe by command, on a machine that is busy."""

# A bare socket: nothing of site-packages is imported, no proxy of the environment is asked.
_ASK = (
    "import socket,sys; s=socket.create_connection(('127.0.0.1',{port}),{timeout}); "
    r"s.sendall(b'GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n'); "
    "sys.exit(not s.makefile('rb').readline().split()[1].startswith(b'2'))"
)


def probes(container: Container) -> Object:
    """``startupProbe``, ``livenessProbe`` and ``readinessProbe`` of a container."""
    given = {
        "startupProbe": container.startup,
        "livenessProbe": container.liveness,
        "readinessProbe": container.readiness,
    }
    return {
        name: _probe(probe, container, readiness=name == "readinessProbe")
        for name, probe in given.items()
        if probe is not None
    }


def _probe(probe: Probe, container: Container, *, readiness: bool) -> Object:
    """Asked less often than on one machine, where it costs nothing; given up after the same time."""
    inside = probe.port in container.loopback
    period = max(math.ceil(probe.period_seconds), EXEC_PERIOD_SECONDS if inside else HTTP_PERIOD_SECONDS)
    threshold = math.ceil(probe.failure_threshold * probe.period_seconds / period)
    timeout = math.ceil(probe.timeout_seconds)
    how: Object
    if inside:
        code = _ASK.format(port=PORTS[probe.port], timeout=timeout, path=probe.path)
        how = {"exec": {"command": ["python", "-I", "-S", "-c", code]}}
        timeout += _START_SECONDS
    else:
        how = {"httpGet": {"path": probe.path, "port": probe.port}}
    return {
        **how,
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": max(threshold, READINESS_FAILURES) if readiness else threshold,
    }
