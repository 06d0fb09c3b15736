"""Environment variables of the processes of a run. ``main`` reads them once; other code gets the parsed values.

Both runtimes set the same variables. A missing or malformed variable raises an error with its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api.attempts import Attempt
from scalerl_api.load import load_accepted_run, load_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun

DIR = "SCALERL_DIR"
NAME = "SCALERL_NAME"
COORDINATOR_URL = "SCALERL_COORDINATOR_URL"
TOKEN_FILE = "SCALERL_TOKEN_FILE"
RUN_FILE = "SCALERL_RUN_FILE"
"""Path of the file with the run's spec, if it is not in ``SCALERL_DIR``: on a cluster it is mounted, and a change of it
restarts the pods."""
TRAINER_HOST = "SCALERL_TRAINER_HOST"
"""Trainers only: address of this rank's weight store for generators; default: loopback."""
ENVIRONMENT_URL = "SCALERL_ENVIRONMENT_URL"
"""Generators of a run with ``spec.environment`` only: address of its servers."""
ATTEMPT = "SCALERL_ATTEMPT"
"""Trainers and coordinators on a cluster only: the :class:`.Attempt`, by which an earlier attempt that still runs is fenced out."""
POD = "SCALERL_POD_UID"
"""Coordinators on a cluster only: uid of the pod."""

OWN_DIRECTORY = "SCALERL_OWN_DIRECTORY"
"""``true`` if the run's directory is this pod's alone, by ``storage.mountedBy: Coordinator``: it starts empty, and what other pods
need of it goes through ``checkpoint.to``."""
MODEL_CACHE = "SCALERL_MODEL_CACHE"
"""Preparation only: folder of ``model.cache``."""
SOURCE_DIR = "SCALERL_SOURCE_DIR"
"""Preparation only: directory of the run ``from.run``, read-only."""
COMPILE_CACHE = "SCALERL_COMPILE_CACHE"
"""vLLM servers only: folder for compiled code that outlives the pod, by ``generator.compileCache``."""
REPORT_FILE = "SCALERL_REPORT_FILE"
"""Preparation only: file for the size of the model, as :class:`scalerl_api.status.ModelStatus`; on a cluster, the container's
termination message."""

OPTIONAL = (
    *(TRAINER_HOST, ATTEMPT, POD, OWN_DIRECTORY, MODEL_CACHE, SOURCE_DIR, COMPILE_CACHE, REPORT_FILE),
    *("SCALERL_VLLM_TOKEN", "SCALERL_VLLM_PREPARED", "SCALERL_VLLM_CAUSES"),
)
"""Variables that a runtime may leave out, and those that the vLLM server sets for its own processes. Empty, they count as not
set."""

BAD_INPUT_EXIT_CODE = 2
"""Exit code of a role whose input is invalid, so that a restart cannot help."""
DIVERGED_EXIT_CODE = 3
"""Exit code of the trainer after consecutive skipped steps, because values are not finite or ratios explode."""
STEPS_LOST_EXIT_CODE = 4
"""Exit code of the coordinator if the run has trained steps, but none of them is on its volume."""
PUBLISH_REFUSED_EXIT_CODE = 5
"""Exit code of the trainer if generators cannot load the weights that it publishes, or compute something else with them."""
SUPERSEDED_EXIT_CODE = 6
"""Exit code of a trainer, or a coordinator, after a later attempt has begun: it has changed no checkpoint, or acknowledged nothing, since."""
COORDINATOR_TIMEOUT_SECONDS = 300.0
"""Time after which a trainer exits because the coordinator does not respond. The lifecycle waits equally long during a drain: a
restart of the coordinator takes seconds, on another node (image, volume) minutes."""


class EnvironmentProblem(Exception):
    """A variable that the runtime should have set is missing or malformed."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """The parsed environment of a role."""

    paths: RunPaths
    name: str
    """Stable name of the replica (``generator-0``, ``trainer-1``, ``coordinator-0``)."""
    coordinator_url: str
    """Base URL of the coordinator, without a slash at the end."""
    token: str = field(repr=False)
    trainer_host: str = "127.0.0.1"
    """Address of this rank's weight store."""
    attempt: Attempt | None = None
    """Of the trainer, or of the coordinator; None on one machine, where a lock excludes two at once."""
    pod: str = ""
    own_directory: bool = False
    """Whether the run's directory is this pod's alone (:data:`OWN_DIRECTORY`)."""

    def load_run(self) -> ScaleRLRun:
        """Read the run from its file. A file from the operator has a spec that it accepted, perhaps in a release with
        fewer rules, so that a run which is suspended and resumed after an upgrade continues with it.

        Raises:
            SpecError: see :func:`scalerl_api.load.load_run`.
        """
        given = self.paths.given_run_file
        return load_run(self.paths.run_file) if given is None else load_accepted_run(given)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> ProcessEnvironment:
        """Parse the process's environment, and read the token file that it names.

        Raises:
            EnvironmentProblem: a variable is missing, or the token cannot be read.
        """
        missing = [name for name in (DIR, NAME, COORDINATOR_URL, TOKEN_FILE) if not environ.get(name)]
        if missing:
            raise EnvironmentProblem(f"not set: {', '.join(missing)}; the runtime sets these for every role")
        token_file = Path(environ[TOKEN_FILE])
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise EnvironmentProblem(f"{TOKEN_FILE}={token_file}: {error.strerror}") from error
        if not token:
            raise EnvironmentProblem(f"{TOKEN_FILE}={token_file}: empty")
        run_file = environ.get(RUN_FILE)
        attempt = Attempt.parse(environ.get(ATTEMPT, ""))
        if attempt is None and environ.get(ATTEMPT):
            raise EnvironmentProblem(f"{ATTEMPT}={environ[ATTEMPT]}: is not the number of an attempt")
        return cls(
            RunPaths(Path(environ[DIR]), Path(run_file) if run_file else None),
            environ[NAME],
            environ[COORDINATOR_URL].rstrip("/"),
            token,
            environ.get(TRAINER_HOST) or cls.trainer_host,
            attempt=attempt,
            pod=environ.get(POD, ""),
            own_directory=environ.get(OWN_DIRECTORY) == "true",
        )
