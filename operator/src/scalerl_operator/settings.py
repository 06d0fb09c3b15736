"""Settings of the operator's process, read from the environment once at its start.

=============================  =======================================================================================
``SCALERL_WATCH_NAMESPACES``   comma-separated namespaces whose runs are reconciled; empty: all of the cluster
``SCALERL_TRAINER_IMAGE``      images of runs that name none (all three are required)
``SCALERL_GENERATOR_IMAGE``
``SCALERL_COORDINATOR_IMAGE``
``SCALERL_IMAGE_PULL_POLICY``  Always, IfNotPresent (default) or Never
``SCALERL_SIDECAR_URL``        URL of the curve-fit sidecar; empty: no forecasts
``SCALERL_GANGS``              true (default): where Kueue serves Workloads, it admits a queued run as a whole; false: in parts
``SCALERL_WORKERS``            runs reconciled at a time (16)
``SCALERL_LISTEN``             address and port of health and metrics (0.0.0.0:8080)
``SCALERL_METRICS_ACCESS``     open (default), or authenticated: for those whom Kubernetes lets get /metrics
``SCALERL_LEASE``              name of the Lease that the leader holds (scalerl-operator)
``SCALERL_LOG_LEVEL``          DEBUG, INFO (default), WARNING or ERROR
``POD_NAMESPACE``              the operator's namespace, which has its Lease (default)
``POD_NAME``                   identity in the Lease and in events (default: the host's name and a random number)
``KUBECONFIG``                 kubeconfig of the API server, outside of a cluster
=============================  =======================================================================================
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from scalerl_operator.kube.leader_election import LEASE_NAME
from scalerl_operator.manifests.scope import Images

_POLICIES = ("Always", "IfNotPresent", "Never")
_ACCESS = ("open", "authenticated")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class SettingsError(ValueError):
    """A variable is missing or invalid; the message names it."""


@dataclass(frozen=True)
class Settings:
    """The process's settings. namespaces: empty for all of the cluster. sidecar_url: None for no forecasts."""

    images: Images
    namespaces: tuple[str, ...] = ()
    sidecar_url: str | None = None
    workers: int = 16
    host: str = "0.0.0.0"  # noqa: S104 the kubelet and Prometheus connect from outside the pod
    port: int = 8080
    metrics_authentication: bool = False
    lease: str = LEASE_NAME
    log_level: str = "INFO"
    operator_namespace: str = "default"
    identity: str = ""
    kubeconfig: str | None = None
    gangs: bool = True
    """Queued runs are admitted as a whole, where Kueue serves Workloads."""
    drain_seconds: float = 15.0
    """For running reconciles to end after SIGTERM."""
    resync_seconds: float = 300.0
    """Between two comparisons of the cached runs with a list."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Reads the environment; :class:`SettingsError` names the first invalid variable."""

        def of(name: str, default: str = "") -> str:
            return environ.get(name, "").strip() or default

        def one_of(name: str, choices: tuple[str, ...], default: str) -> str:
            if (value := of(name, default)) not in choices:
                raise SettingsError(f"{name} is {value!r}; it is one of {', '.join(choices)}")
            return value

        def image(role: str) -> str:
            name = f"SCALERL_{role}_IMAGE"
            if not (value := of(name)):
                raise SettingsError(f"{name} is empty; name the image of runs that name none")
            return value

        host, port = _listen(of("SCALERL_LISTEN", "0.0.0.0:8080"))
        return cls(
            images=Images(
                trainer=image("TRAINER"),
                generator=image("GENERATOR"),
                coordinator=image("COORDINATOR"),
                pull_policy=one_of("SCALERL_IMAGE_PULL_POLICY", _POLICIES, "IfNotPresent"),
            ),
            namespaces=tuple(
                dict.fromkeys(n.strip() for n in of("SCALERL_WATCH_NAMESPACES").split(",") if n.strip())
            ),
            sidecar_url=_sidecar_url(of("SCALERL_SIDECAR_URL")),
            workers=_workers(of("SCALERL_WORKERS", "16")),
            host=host,
            port=port,
            metrics_authentication=one_of("SCALERL_METRICS_ACCESS", _ACCESS, "open") == "authenticated",
            lease=of("SCALERL_LEASE", LEASE_NAME),
            log_level=one_of("SCALERL_LOG_LEVEL", _LEVELS, "INFO"),
            operator_namespace=of("POD_NAMESPACE", "default"),
            identity=of("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
            kubeconfig=of("KUBECONFIG") or None,
            gangs=one_of("SCALERL_GANGS", ("true", "false"), "true") == "true",
        )


def _listen(value: str) -> tuple[str, int]:
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise SettingsError(f"SCALERL_LISTEN is {value!r}; it is ADDRESS:PORT, as 0.0.0.0:8080")
    return host.strip("[]"), int(port)


def _sidecar_url(value: str) -> str | None:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise SettingsError(
            f"SCALERL_SIDECAR_URL is {value!r}; it is a URL as http://127.0.0.1:8090, or empty"
        )
    return value.rstrip("/") or None


def _workers(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise SettingsError(f"SCALERL_WORKERS is {value!r}; it is a number from 1 to 1024")
    return int(value)
