"""The probes of a container, from those of the plan."""

from __future__ import annotations

import math
from typing import Final

from scalerl_lifecycle.workloads import Container, Probe
from scalerl_operator.kube.types import Object
from scalerl_operator.names import PORTS

HTTP_PERIOD_SECONDS: Final = 5
EXEC_PERIOD_SECONDS: Final = 10
"""Each exec probe starts a process."""
READINESS_FAILURES: Final = 3
"""One late response of a busy process must not make its pod unavailable, which would block a node drain."""
_START_SECONDS = 5
"""For an exec probe's interpreter to start on a busy machine."""
# A socket needs no packages and ignores proxy variables.
_HTTP_GET = (
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
    """A probe with a longer period than in the local runtime, where probes are cheap, and the same time until it fails."""
    inside = probe.port in container.loopback
    period = max(math.ceil(probe.period_seconds), EXEC_PERIOD_SECONDS if inside else HTTP_PERIOD_SECONDS)
    threshold = math.ceil(probe.failure_threshold * probe.period_seconds / period)
    timeout = math.ceil(probe.timeout_seconds)
    action: Object
    if inside:
        code = _HTTP_GET.format(port=PORTS[probe.port], timeout=timeout, path=probe.path)
        action = {"exec": {"command": ["python", "-I", "-S", "-c", code]}}
        timeout += _START_SECONDS
    else:
        action = {"httpGet": {"path": probe.path, "port": probe.port}}
    return {
        **action,
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": max(threshold, READINESS_FAILURES) if readiness else threshold,
    }
