"""Environment variables of containers."""

from __future__ import annotations

from typing import Final

from scalerl_api import process as api
from scalerl_api.pods import PodTemplate
from scalerl_api.reserved_in_pods import RANK_VARIABLES
from scalerl_lifecycle.workloads import ADDRESS, BIND, Container, Role, port_variable
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.pod_settings import PodSettings
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.manifests.volumes import is_own_directory
from scalerl_operator.names import RUN_DIR, SPEC_DIR, SPEC_KEY, TOKEN_DIR, TOKEN_KEY

HOME: Final = "/tmp/home"  # noqa: S108 - a volume of its own
_OF_THE_RUN: Final = (api.DIR, api.RUN_FILE, api.TOKEN_FILE, api.COORDINATOR_URL, api.OWN_DIRECTORY)
"""Variables that environment servers do not have."""


def variable(name: str, value: str) -> Object:
    """An entry of ``env``."""
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Object:
    """A variable from a field of the pod (downward API)."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def environment_of(
    scope: Scope, settings: PodSettings, given: PodTemplate, container: Container
) -> list[Object]:
    """The runtime's variables, each of which may refer to those before it, then the plan's, then the user's. A user's variable
    overrides the plan's, not the runtime's.
    """
    threads = container.resources.cpu_threads
    ports = [port for other in scope.plan.workload(settings.role).containers for port in other.ports]
    fixed = [
        variable(api.DIR, RUN_DIR),
        variable(api.RUN_FILE, f"{SPEC_DIR}/{SPEC_KEY}"),
        variable(api.TOKEN_FILE, f"{TOKEN_DIR}/{TOKEN_KEY}"),
        variable(api.COORDINATOR_URL, scope.names.coordinator_url(scope.namespace)),
        variable(BIND, "0.0.0.0"),  # noqa: S104 - the pod's own network, restricted by the NetworkPolicy
        from_field(ADDRESS, "status.podIP"),
        *_environment_url(scope, settings.role),
        *([variable(api.OWN_DIRECTORY, "true")] if is_own_directory(scope, settings.role) else []),
        *settings.variables,
        from_field(api.NAME, "metadata.name") if settings.name is None else variable(api.NAME, settings.name),
        *(variable(port_variable(port), str(scope.port(port))) for port in ports),
    ]
    if settings.role is Role.ENVIRONMENT:
        fixed = [entry for entry in fixed if entry["name"] not in _OF_THE_RUN]
    planned = {
        "HOME": HOME,
        # torch needs a user name, and the image has no user with this number.
        "USER": "scalerl",
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        **settings.extra.get(container.name, {}),
        **container.env,
    }
    fixed_names = {entry["name"] for entry in fixed}
    user = [entry for entry in given.env if entry["name"] not in fixed_names]
    overridden = {entry["name"] for entry in user}
    if (
        given.env_from and settings.role is not Role.ENVIRONMENT
    ):  # a variable that is not set here would come from there
        planned = {name: "" for name in api.OPTIONAL if name not in fixed_names} | planned
        fixed += [entry for entry in _single_rank(settings) if entry["name"] not in fixed_names]
    return [
        *fixed,
        *(variable(name, text) for name, text in planned.items() if name not in overridden),
        *user,
    ]


def _environment_url(scope: Scope, role: Role) -> list[Object]:
    environment = scope.spec.environment
    if role is not Role.GENERATOR or environment is None:
        return []
    url = scope.names.environment_url(scope.namespace, environment.port)
    return [variable(api.ENVIRONMENT_URL, url)]


def _single_rank(settings: PodSettings) -> list[Object]:
    """Variables of torch.distributed that a trainer pod of one rank, or its launcher, does not set, as for one rank a node."""
    if settings.role is not Role.TRAINER:
        return []
    return [variable(name, "1" if name.endswith("WORLD_SIZE") else "0") for name in RANK_VARIABLES[:5]]
