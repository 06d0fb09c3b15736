"""``python -m scalerl_trainer.main --listen HOST:PORT``: one rank of the trainer.

Exit codes:

0
    The run has finished, or SIGTERM arrived. In both cases a checkpoint is written first, except after a SIGTERM during the rendezvous.
1
    Any other failure, including that the last checkpoint could not be written. All ranks restart from the last checkpoint.
2
    A failure that a restart does not fix: wrong environment, run file, model or solutions for mid-training; checkpoints of another model, all
    damaged, or all lost although the coordinator has a record of one; a prefix of checkpoint.to that is another run's.
3
    Training diverged: three consecutive skipped steps, one of mid-training, or a step in which most log-probabilities of the
    generators or of the trainer are not numbers. No checkpoint is written. One restart repeats the same batches from the last
    checkpoint; if training diverges again, the runtime gives up.
5
    Generators cannot load the published weights, or compute something else with them. A checkpoint is written first, of these
    weights or of those after the step that was computed beside the publish. One restart publishes them again; if that is refused too, the runtime gives up.
6
    A later attempt of the trainer has begun, on a cluster while this one's node was lost. Since then, this one has changed no
    checkpoint and no export, and the coordinator refuses its requests.

A step whose loss or gradient is not finite, or whose importance ratios explode, is skipped and recorded.

If :mod:`scalerl_trainer.launch` starts several ranks in a pod, only ``LOCAL_RANK`` 0 listens on ``--listen``; the others listen on a free port.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from functools import partial

import torch

from scalerl_api.attempts import Attempt
from scalerl_api.load import SpecError
from scalerl_api.object_store import ObjectStore, StoreError
from scalerl_api.paths import RunPaths
from scalerl_api.process import (
    BAD_INPUT_EXIT_CODE,
    COORDINATOR_TIMEOUT_SECONDS,
    DIVERGED_EXIT_CODE,
    PUBLISH_REFUSED_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    EnvironmentProblem,
    ProcessEnvironment,
)
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_trainer.algo.losses.make_loss import make_loss
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.load import CheckpointLoader, NoUsableCheckpoint
from scalerl_trainer.checkpoints.manifest import CheckpointError
from scalerl_trainer.checkpoints.object_store import CheckpointCopies, PrefixTaken, identity
from scalerl_trainer.checkpoints.upload import Uploader
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import TIMINGS, Checkpointer, Timings
from scalerl_trainer.coordinator_client import Coordinator, Unresumable
from scalerl_trainer.device_memory import check_device_memory, out_of_memory
from scalerl_trainer.engine import Engine, Rank, init_process_group
from scalerl_trainer.engine.settings import engine_settings
from scalerl_trainer.errors import (
    AttemptSuperseded,
    DivergedError,
    EngineError,
    MidTrainingError,
    ModelError,
    PublishRefusedError,
    Stopped,
)
from scalerl_trainer.export import copy_run_file
from scalerl_trainer.exporter import Exporter
from scalerl_trainer.fence import Fence
from scalerl_trainer.leader import Leader
from scalerl_trainer.metrics import Metrics, StatusServer
from scalerl_trainer.mid_training import MidTraining, remove_checkpoints
from scalerl_trainer.models import open_model
from scalerl_trainer.models.checkpoint_names import stored_names
from scalerl_trainer.models.lora import PUBLISHED
from scalerl_trainer.object_store_folders import EXPORTS
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.make_publisher import (
    collective_timeout_seconds,
    make_publisher,
    publish_limit_seconds,
)
from scalerl_trainer.publish.probe import first_probes
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.reference import load_reference, write_weights
from scalerl_trainer.worker import Worker

log = logging.getLogger("scalerl_trainer")

_BAD_INPUT = (
    EnvironmentProblem,
    SpecError,
    ModelError,
    EngineError,
    Unresumable,
    NoUsableCheckpoint,
    MidTrainingError,
    PrefixTaken,
)


def set_on_signals(stop: threading.Event) -> None:
    """Set ``stop`` on SIGTERM and SIGINT.

    Another thread sets it: the handler runs in the main thread, which may hold the event's lock in ``stop.wait``, and would deadlock.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _thread.start_new_thread(stop.set, ()))


def run(
    environment: ProcessEnvironment,
    rank: Rank,
    host: str,
    port: int,
    stop: threading.Event,
    timings: Timings = TIMINGS,
) -> None:
    """Run one rank, from the rendezvous to the end of the run or a stop. The module lists the exit codes of its errors.

    Args:
        timings: of the writing of checkpoints.
    """
    given = environment.load_run()
    spec = given.spec
    if spec.trainer.cpu_threads is not None:
        torch.set_num_threads(spec.trainer.cpu_threads)
    metrics = Metrics()
    status = StatusServer(host, port, metrics)
    device = init_process_group(
        rank,
        device="cuda" if spec.trainer.devices else "cpu",
        token=environment.token,
        timeout_seconds=collective_timeout_seconds(spec),
        stopped=stop.is_set,
    )
    ranks = Ranks(rank.rank, rank.world, 2 * COORDINATOR_TIMEOUT_SECONDS + publish_limit_seconds(spec))
    attempt, paths = environment.attempt, environment.paths
    fence = _begin(paths, attempt, ranks)
    volume = CheckpointStore(paths, spec.checkpoint.keep, fence=fence, removes_aside=True)
    prefix = "" if attempt is None else f"{attempt}-"
    incarnation = ranks.broadcast(prefix + uuid.uuid4().hex if ranks.is_leader else None, str)

    check_device_memory(ranks, device, paths.base_model, spec)
    engine = _open_engine(spec, paths, device)
    uploader = _uploader(given, incarnation, volume, ranks, metrics)
    checkpointer, version = _load_checkpoint(spec, paths, volume, ranks, engine, uploader, stop, timings)
    coordinator = Coordinator(
        environment.coordinator_url, environment.token, incarnation, COORDINATOR_TIMEOUT_SECONDS, stop.is_set
    )
    trained_supervised = version is None and spec.warm_start is not None
    if trained_supervised:
        status.ready.set()
        _train_supervised(engine, spec, environment, ranks, coordinator, stop, timings)
    if spec.recipe.kl.penalty is not None:
        _set_reference(engine, spec, paths)

    worker = Worker(
        spec=spec,
        ranks=ranks,
        engine=engine,
        loss=make_loss(spec.recipe),
        coordinator=coordinator,
        checkpointer=checkpointer,
        metrics=metrics,
        stop=stop,
        version=version or 0,
    )
    status.ready.set()
    if not ranks.is_leader:
        worker.follow()
        return
    _lead(worker, given, environment, fence, volume, version, save_first=trained_supervised)
    volume.close()


def _open_engine(spec: RunSpec, paths: RunPaths, device: torch.device) -> Engine:
    """The engine of the run's model, with what its updates need.

    Raises:
        ModelError: the model cannot be loaded, trained or published.
    """
    opened = partial(open_model, paths.base_model, dtype=spec.model.dtype, attention=spec.model.attention)
    gc.disable()  # Transformers and DeepSpeed, which are imported here, make a million objects that stay
    model, weights = opened()
    engine = Engine(
        model, engine_settings(spec, paths.base_model), device, stored_names(paths.base_model), weights
    )
    gc.collect()
    gc.freeze()  # so later collections skip them
    gc.enable()
    if spec.trainer.publishes_adapters:
        engine.weights.adapter_shapes(PUBLISHED)  # refuses, before training, what cannot be published
    if spec.recipe.proximal_updates:
        proximal, base = opened()
        engine.keep_proximal(proximal, None if spec.trainer.lora is None else base)
    return engine


def _uploader(
    given: ScaleRLRun, incarnation: str, volume: CheckpointStore, ranks: Ranks, metrics: Metrics
) -> Uploader | None:
    """Copies checkpoints to ``checkpoint.to``; None without it."""
    to, keep = given.spec.checkpoint.to, given.spec.checkpoint.keep
    if to is None:
        return None
    copies = CheckpointCopies(ObjectStore(to), identity(given), incarnation)
    return Uploader(copies, volume, rank=ranks.rank, world=ranks.world, keep=keep, metrics=metrics)


def _load_checkpoint(
    spec: RunSpec,
    paths: RunPaths,
    volume: CheckpointStore,
    ranks: Ranks,
    engine: Engine,
    uploader: Uploader | None,
    stop: threading.Event,
    timings: Timings,
) -> tuple[Checkpointer, int | None]:
    """Load the newest checkpoint.

    Returns:
        What writes the next ones, and the version of the loaded one; None without one.

    Raises:
        NoUsableCheckpoint: all are damaged, or the run is a fork and has none.
    """
    version = CheckpointLoader(
        volume,
        ranks,
        engine,
        uploader=uploader,
        stopped=stop.is_set,
        exchange_seconds=timings.exchange,
    ).load()
    checkpointer = Checkpointer(volume, ranks, engine, uploader, timings)
    checkpointer.continue_from(version)
    if version is None and spec.fork is not None:
        # Without this, the fork would begin again from the base model.
        raise NoUsableCheckpoint(
            f"from {spec.fork.run}: neither {paths.checkpoints} nor checkpoint.to has a checkpoint; fork the run again"
        )
    return checkpointer, version


def _train_supervised(
    engine: Engine,
    spec: RunSpec,
    environment: ProcessEnvironment,
    ranks: Ranks,
    coordinator: Coordinator,
    stop: threading.Event,
    timings: Timings,
) -> None:
    """Train on solutions, and write the weights after that: a penalty of ``recipe.kl`` needs them, also one that is added later."""
    paths = environment.paths
    fence = _begin(paths.mid_training, environment.attempt, ranks)
    training = MidTraining(engine, spec, paths, ranks, coordinator, stop, fence, timings=timings)
    done = training.run()
    write = partial(write_weights, engine, paths.warm_started_weights, ranks)
    if spec.recipe.kl.penalty is not None:
        training.keep_weights(done, write)
        return
    try:
        write()
    except OSError as error:
        log.warning(
            "recipe.kl cannot be added to this run later, because its warm-started weights could not be written: %s",
            error,
        )


def _set_reference(engine: Engine, spec: RunSpec, paths: RunPaths) -> None:
    if spec.trainer.lora is not None and spec.warm_start is None:
        engine.set_base_as_reference()
    else:
        engine.set_reference(*load_reference(paths, spec))


def _lead(
    worker: Worker,
    given: ScaleRLRun,
    environment: ProcessEnvironment,
    fence: Fence | None,
    volume: CheckpointStore,
    version: int | None,
    *,
    save_first: bool,
) -> None:
    """Lead the ranks to the end of the run or a stop.

    Args:
        version: of the loaded checkpoint; None without one.
        save_first: whether a checkpoint is written before the first step, for the weights after mid-training.
    """
    spec, paths = given.spec, environment.paths
    worker.probes = first_probes(paths.base_model, spec)
    with contextlib.closing(ActorControl(environment.token)) as control:
        snapshot = volume.snapshot(version) if version is not None else None
        copy_run_file(paths)
        own_directory, to = environment.own_directory, spec.checkpoint.to
        exports_to = f"{to}/{EXPORTS}" if own_directory else None
        exporter = Exporter(paths, spec, worker.metrics, fence=fence, to=exports_to)
        publisher = make_publisher(given, environment, fence, worker.engine.device, control)
        leader = Leader(
            *(worker, publisher, control, exporter, environment.load_run), own_directory=own_directory
        )
        remove_mid_training = partial(remove_checkpoints, paths)
        if version is not None:
            remove_mid_training()
        try:
            leader.lead(snapshot, remove_mid_training if save_first else None)
        finally:
            publisher.close()


def _begin(paths: RunPaths, attempt: Attempt | None, ranks: Ranks) -> Fence | None:
    if not ranks.is_leader:
        return None
    try:
        return Fence.begin(paths.checkpoints, attempt, Disk())
    except OSError as error:
        raise CheckpointError(
            f"{paths.checkpoints}: this attempt cannot begin to write checkpoints: {error}"
        ) from error


def main(argv: Sequence[str] | None = None, timings: Timings = TIMINGS) -> int:
    """Entry point; returns the exit code that the module documents."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(prog="scalerl_trainer.main", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", type=_address)
    host, port = parser.parse_args(argv).listen
    stop = threading.Event()
    set_on_signals(stop)
    try:
        rank = Rank.from_environment(os.environ)
        if rank.local_rank > 0:
            # The pod's port belongs to its first rank, which answers probes and scrapes.
            host, port = "127.0.0.1", 0
        run(ProcessEnvironment.read(), rank, host, port, stop, timings)
    except _BAD_INPUT as problem:
        log.error("%s", problem)
        return BAD_INPUT_EXIT_CODE
    except DivergedError as problem:
        log.critical("BROKEN: %s", problem)
        return DIVERGED_EXIT_CODE
    except PublishRefusedError as problem:
        log.critical("PUBLISH REFUSED: %s", problem)
        return PUBLISH_REFUSED_EXIT_CODE
    except Stopped as problem:
        log.info("%s", problem)
        return 0
    except AttemptSuperseded as problem:
        log.error("SUPERSEDED: %s", problem)
        return SUPERSEDED_EXIT_CODE
    except Exception as problem:
        known = str(problem) if isinstance(problem, CheckpointError | StoreError) else out_of_memory(problem)
        log.error("%s", known or "unexpected exception", exc_info=None if known else problem)
        return 1
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def exit_now(code: int) -> None:
    """End the process at once. An ordinary exit would wait for threads, which may be blocked in a collective."""
    with contextlib.suppress(
        OSError
    ):  # the log's volume may be full: what is lost of it changes no exit code
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
