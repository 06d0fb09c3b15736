"""``python -m scalerl_trainer.main --listen HOST:PORT``: one rank of the trainer.

Exit codes: 0 when the run has finished or after SIGTERM (a checkpoint is written first; in the rendezvous and in the
warm start there is nothing to write); 2 when starting
again would not help (environment, run file, model, solutions of a warm start, checkpoints of another
model, all damaged or lost while the coordinator knows of some); 1 for everything else (also when the last
checkpoint could not be written), after which all ranks are started again and go on from the last checkpoint.

A step whose loss or gradient is not finite, or whose ratios explode, is skipped, and a record says so. Training
that diverged (three skipped steps in a row, or one of the warm start) is exit code 3: no checkpoint is written. One
restart repeats the same batches from the last good checkpoint; if that ends the same way it was no accident, and the
runtime gives up.

Where a pod holds several ranks, :mod:`scalerl_trainer.launch` starts them, and only ``LOCAL_RANK`` 0 listens on
``--listen``; the others listen on a free port of the loopback address.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence

import torch

from scalerl_api.load import SpecError
from scalerl_api.process import (
    BAD_INPUT_EXIT_CODE,
    COORDINATOR_TIMEOUT_SECONDS,
    DIVERGED_EXIT_CODE,
    EnvironmentProblem,
    ProcessEnvironment,
)
from scalerl_trainer.checkpoint import CheckpointStore
from scalerl_trainer.coordinator_client import Coordinator, Superseded, Unresumable
from scalerl_trainer.engine import Engine, Rank, join
from scalerl_trainer.errors import DivergedError, EngineError, ModelError, Stopped, WarmStartError
from scalerl_trainer.export import keep_run_file
from scalerl_trainer.exporting import Exporter
from scalerl_trainer.leader import Leader
from scalerl_trainer.metrics import Metrics, StatusServer
from scalerl_trainer.models import load_model
from scalerl_trainer.publish.control import ActorControl
from scalerl_trainer.publish.publisher import PATIENCE, Publisher
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.recipe import collective_seconds, engine_settings, make_loss, publish_settings
from scalerl_trainer.saving import Saver, Unusable
from scalerl_trainer.start import warm_up
from scalerl_trainer.worker import Worker

log = logging.getLogger("scalerl_trainer")

_BAD_INPUT = (
    EnvironmentProblem,
    SpecError,
    ModelError,
    EngineError,
    Unresumable,
    Unusable,
    WarmStartError,
)


def run(environment: ProcessEnvironment, rank: Rank, host: str, port: int, stop: threading.Event) -> None:
    """One rank, from joining the others to leaving them."""
    spec = environment.load_run().spec
    if spec.trainer.cpu_threads is not None:
        torch.set_num_threads(spec.trainer.cpu_threads)
    metrics = Metrics()
    status = StatusServer(host, port, metrics)
    device = join(
        rank,
        device="cuda" if spec.trainer.devices else "cpu",
        timeout_seconds=collective_seconds(spec),
        stopped=stop.is_set,
    )
    timeout_seconds = 2 * COORDINATOR_TIMEOUT_SECONDS + PATIENCE * spec.weight_sync.timeout_seconds
    ranks = Ranks(rank.rank, rank.world, timeout_seconds)
    incarnation = ranks.from_leader(uuid.uuid4().hex if ranks.leads else None)

    model = load_model(
        str(environment.paths.base_model), dtype=spec.model.dtype, attention=spec.model.attention
    )
    engine = Engine(model, engine_settings(spec), device)
    saver = Saver(CheckpointStore(environment.paths, spec.checkpoint.keep), ranks, engine)
    version = saver.load()
    warm = version is None and spec.warm_start is not None
    if warm:
        warm_up(engine, spec, environment.paths.base_model, ranks, stop)

    coordinator = Coordinator(
        environment.coordinator_url, environment.token, incarnation, COORDINATOR_TIMEOUT_SECONDS, stop.is_set
    )
    worker = Worker(
        spec=spec,
        ranks=ranks,
        engine=engine,
        loss=make_loss(spec.recipe.loss),
        coordinator=coordinator,
        saver=saver,
        metrics=metrics,
        stop=stop,
        version=version or 0,
    )
    status.ready.set()
    if not ranks.leads:
        worker.follow()
        return
    control = ActorControl(environment.token)
    settings = publish_settings(spec, environment.trainer_host, device)
    snapshot = saver.snapshot(version) if version is not None else None
    keep_run_file(environment.paths)
    exporter = Exporter(environment.paths, spec, metrics)
    leader = Leader(worker, Publisher(settings, control), control, exporter, environment.load_run)
    leader.lead(snapshot, save_now=warm)


def main(argv: Sequence[str] | None = None) -> int:
    """The process; see the module for what it returns."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(prog="scalerl_trainer.main", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", type=_address)
    host, port = parser.parse_args(argv).listen
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        rank = Rank.from_environment(os.environ)
        if rank.local_rank > 0:
            # The first rank of a pod has the pod's port, and answers the probes and the scrapes.
            host, port = "127.0.0.1", 0
        run(ProcessEnvironment.read(), rank, host, port, stop)
    except _BAD_INPUT as problem:
        log.error("%s", problem)
        return BAD_INPUT_EXIT_CODE
    except DivergedError as problem:
        log.critical("BROKEN: %s", problem)
        return DIVERGED_EXIT_CODE
    except Stopped as problem:
        log.info("%s", problem)
        return 0
    except Superseded as problem:
        log.error("%s", problem)
        return 1
    except Exception:
        log.exception("crashed")
        return 1
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def leave(code: int) -> None:
    """End the process now: threads that are stuck in a collective would hold up an ordinary exit."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
