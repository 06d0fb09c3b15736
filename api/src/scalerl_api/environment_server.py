"""``spec.environment``: servers that make the steps of ``task.environment``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scalerl_api.cluster import Image
from scalerl_api.fields import Model, Rule
from scalerl_api.pods import PodTemplate


class EnvironmentServerSpec(Model):
    """Servers for ``task.environment`` with the name ``server``, which start and end with the run."""

    image: Image | None = None
    """Image of the server. Default: the generator's, for a ``command`` whose files podTemplate mounts. Ignored by the local runtime."""
    command: Annotated[list[Annotated[str, Field(max_length=16_384)]], Field(max_length=64)] = []
    """Command in place of the image's; on one machine, that of the process. ``$(HOST)`` and ``$(PORT)`` are where it has to listen;
    they are variables too."""
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of pods; one process on one machine."""
    sessions_per_replica: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Sessions that a server can have. There are as many replicas as the sessions of all generators need, and at least ``replicas``;
    OpenEnv's ``max_concurrent_envs`` is such a number."""
    port: Annotated[int, Field(ge=1024, le=65_535)] = 8000
    """Port of the server; on one machine, a free one."""
    pod_template: PodTemplate | None = None
    """Additions to the servers' pods. The run's podTemplate is not added: it may have credentials, and nodes with accelerators. Ignored
    by the local runtime."""

    rules = (
        Rule(
            "has(self.image) || (has(self.command) && size(self.command) > 0)",
            "give image, command or both",
            holds=lambda server: server.image is not None or bool(server.command),
        ),
    )
