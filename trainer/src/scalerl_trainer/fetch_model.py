"""``python -m scalerl_trainer.fetch_model [--without-weights]``: fetches the prepared model, and the tables of ``task.dataset``, from
``checkpoint.to`` to ``DIR/model`` and ``DIR/data``.

The init container of pods that do not mount the run's volume (``storage.mountedBy: Coordinator``). Exit code: 0 on success; 1 if
the store does not have them, or could not be read in several attempts; 2 for bad input, such as an absent bucket.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from scalerl_api.load import SpecError
from scalerl_api.object_store import BucketAbsent, ObjectStore, StoreError
from scalerl_api.process import BAD_INPUT_EXIT_CODE, EnvironmentProblem, ProcessEnvironment
from scalerl_trainer.object_store_folders import fetch, of_run

log = logging.getLogger("scalerl_trainer.fetch_model")

PAUSES = (1.0, 4.0, 15.0, 60.0)
"""Seconds before each retry. A trainer's pod does not restart its init container: a failure ends the attempt of all ranks."""


def main(argv: Sequence[str] | None = None, pauses: Sequence[float] = PAUSES) -> int:
    """Run the command; returns the exit code (see the module). pauses: seconds before each retry."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    parser = argparse.ArgumentParser(prog="scalerl_trainer.fetch_model", description=__doc__)
    parser.add_argument("--without-weights", action="store_true", help="config and tokenizer only")
    weights = not parser.parse_args(argv).without_weights
    try:
        environment = ProcessEnvironment.read()
        spec = environment.load_run().spec
        to = spec.checkpoint.to
    except (EnvironmentProblem, SpecError) as problem:
        log.error("%s", problem)
        return BAD_INPUT_EXIT_CODE
    if to is None:
        log.error("checkpoint.to: it is not set, so there is no store to fetch from")
        return BAD_INPUT_EXIT_CODE
    for pause in (*pauses, None):
        try:
            store, problem_text = ObjectStore(to), ""
            for folder in of_run(spec):
                target = environment.paths.root / folder
                if fetch(store, folder, target, leave_out="" if weights else ".safetensors"):
                    log.info("%s/%s is in %s", to, folder, target)
                else:
                    problem_text = problem_text or f"{to}/{folder}: the preparation has not uploaded it"
            if not problem_text:
                return 0
        except BucketAbsent as problem:
            log.error(
                "checkpoint.to: %s: create it, or correct checkpoint.to, or region and endpoint in the environment",
                problem,
            )
            return BAD_INPUT_EXIT_CODE
        except (StoreError, OSError) as problem:
            problem_text = str(problem)
        if pause is not None:
            log.warning("%s; next attempt in %g s", problem_text, pause)
            time.sleep(pause)
    log.error("%s", problem_text)
    return 1


if __name__ == "__main__":
    sys.exit(main())
