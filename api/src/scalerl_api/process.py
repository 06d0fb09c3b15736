"""How a process of a run learns where it stands: read once, in ``main``, never in the middle of logic.

Both runtimes set the same variables. A missing or malformed one is one error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api.load import load_accepted_run, load_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun

DIR = "SCALERL_DIR"
NAME = "SCALERL_NAME"
COORDINATOR_URL = "SCALERL_COORDINATOR_URL"
TOKEN_FILE = "SCALERL_TOKEN_FILE"
RUN_FILE = "SCALERL_RUN_FILE"
"""Where the run's spec is, if not in ``SCALERL_DIR``: on a cluster it is mounted, and a changed one rolls the pods."""
TRAINER_HOST = "SCALERL_TRAINER_HOST"
"""Trainers only: the address under which generators reach this rank's weight store; unset: loopback."""

BAD_INPUT_EXIT_CODE = 2
"""A role exits with this when its input is wrong: starting it again cannot help."""
DIVERGED_EXIT_CODE = 3
"""The trainer exits with this when steps in a row had to be skipped: not finite, or ratios that explode."""
STEPS_LOST_EXIT_CODE = 4
"""The coordinator exits with this when the run has trained steps and none of them is on its volume."""
COORDINATOR_TIMEOUT_SECONDS = 300.0
"""How long the trainer waits for a coordinator that does not answer. The operator waits as long during a drain: a restart
takes seconds, on another node (image, volume) minutes, and a trainer that reaches nobody ends by itself after that."""


class EnvironmentProblem(Exception):
    """A variable that the runtime should have set is missing or malformed."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """What every role gets.

    ``name`` is the replica's stable name (``generator-0``, ``trainer-1``, ``coordinator-0``).
    """

    paths: RunPaths
    name: str
    coordinator_url: str
    token: str = field(repr=False)
    trainer_host: str = "127.0.0.1"

    def load_run(self) -> ScaleRLRun:
        """The run, as its file is now. What an operator gives it has accepted, perhaps in an earlier release with fewer
        rules: a run that is suspended and resumed after an upgrade continues with it.

        Raises:
            SpecError: see :func:`scalerl_api.load.load_run`.
        """
        given = self.paths.given_run_file
        return load_run(self.paths.run_file) if given is None else load_accepted_run(given)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> ProcessEnvironment:
        """From the process's environment and the token file it names.

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
        return cls(
            RunPaths(Path(environ[DIR]), Path(run_file) if run_file else None),
            environ[NAME],
            environ[COORDINATOR_URL].rstrip("/"),
            token,
            environ.get(TRAINER_HOST) or cls.trainer_host,
        )
