"""Names, paths, labels and variables that the operator itself sets in pods, so that a ``podTemplate`` cannot have them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

RESERVED_VARIABLES = "SCALERL_"
"""Prefix of the variables that a runtime sets."""
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of torch.distributed for the trainer's ranks; the runtime sets them too."""
RESERVED_LABELS = ("scalerl.dev/", "app.kubernetes.io/", "batch.kubernetes.io/")
"""Prefixes of the labels and annotations that select a run's objects."""
RESERVED_PATHS = (
    *("/run/scalerl", "/var/run/scalerl", "/etc/scalerl", "/tmp", "/dev/shm"),  # noqa: S108
    *("/opt/scalerl", "/opt/scalerl-members"),
)
"""Mount paths of the operator (the run's volume, its spec and token, writable directories of the roles), and the directories of
the images' programs. A user's mount may be neither at, nor below, nor above such a path. ``/var/run`` is a link to ``/run`` in
the images."""
SYSTEM_PATHS = ("/bin", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/usr/lib", "/usr/local")
"""Directories without which no program starts. A user's mount may be below such a path, but not at it."""
RESERVED_VOLUMES = "scalerl-"
"""Prefix of the operator's own volumes."""
ROLE_CONTAINERS = ("prepare", "fetch-model", "coordinator", "server", "actor", "trainer", "environment")
"""Names of the operator's containers, which no other container of their pods may have."""

PLAIN_PATH = re.compile(r"(/|(/([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))+/?)")
PLAIN_PATH_MESSAGE = "must be written plainly: no //, no /./ and no /../"
RESERVED_PATH_MESSAGE = "the operator mounts there itself, or below it; choose another path"
RESERVED_MOUNT_MESSAGE = (
    f"volumes whose names start with {RESERVED_VOLUMES} are the operator's, with the files of every run that shares the claim; "
    "mount a volume of your own"
)
ROLE_CONTAINER_MESSAGE = (
    f"the operator's own containers have the names {', '.join(ROLE_CONTAINERS)}; choose another"
)
SYSTEM_PATH_MESSAGE = "a mount there hides the image's own programs; choose another path"

Raw = dict[str, Any]
"""A Kubernetes object, as in the Kubernetes API reference."""


@dataclass(frozen=True)
class Named:
    """Requires a ``name`` that is not reserved."""

    what: str
    """Kind of entry, for error messages."""
    reserved: str
    taken: tuple[str, ...] = ()

    def __call__(self, value: Raw) -> Raw:
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"every {self.what} needs a name")
        if name.startswith(self.reserved):
            raise ValueError(
                f"{name}: names that start with {self.reserved} are the operator's; choose another"
            )
        if name in self.taken:
            raise ValueError(f"{name}: the operator itself sets {', '.join(self.taken)}; leave it out")
        return value


def own_path(mount: Raw) -> Raw:
    """Require the name of a user's volume, and an absolute mount path that the operator does not use."""
    name, path = mount.get("name"), mount.get("mountPath")
    if not isinstance(name, str) or not name or not isinstance(path, str) or not path:
        raise ValueError("every mount needs a name (of a volume) and a mountPath")
    if name.startswith(RESERVED_VOLUMES):
        raise ValueError(f"{name}: {RESERVED_MOUNT_MESSAGE}")
    if not path.startswith("/"):
        raise ValueError(f"mountPath {path} must be absolute")
    if not PLAIN_PATH.fullmatch(path):
        raise ValueError(f"mountPath {path}: {PLAIN_PATH_MESSAGE}")
    below = path if path.endswith("/") else path + "/"
    if any(below.startswith(taken + "/") or taken.startswith(below) for taken in RESERVED_PATHS):
        raise ValueError(f"mountPath {path}: {RESERVED_PATH_MESSAGE}")
    if below[:-1] in SYSTEM_PATHS:
        raise ValueError(f"mountPath {path}: {SYSTEM_PATH_MESSAGE}")
    return mount


def unreserved(values: dict[str, str]) -> dict[str, str]:
    """Reject labels and annotations that the operator sets itself."""
    for name in values:
        if name.startswith(RESERVED_LABELS):
            raise ValueError(f"{name}: {name.split('/')[0]}/ is the operator's own; choose another prefix")
    return values


def other_container(name: str) -> str:
    """Reject the name of a role's own container."""
    if name in ROLE_CONTAINERS:
        raise ValueError(f"{name}: {ROLE_CONTAINER_MESSAGE}")
    return name
