"""The weight-transfer engine ``scalerl`` of a vLLM worker, over gloo or NCCL, or through files.

vLLM loads this module in every process of the server through its ``vllm.general_plugins`` entry point
(:func:`register`). :mod:`.vllm_weights` makes all requests of the protocol:

1. ``init``: the worker joins a process group with a separate store, not the default group, so that a new group can replace
   it when the membership changes. The sender is rank 0. The group opens in a thread, because it waits for its slowest member,
   and the worker generates meanwhile; the client asks for the outcome.
2. ``start``, ``update``, ``finish``: generation is paused meanwhile. Buckets have the layout of
   :mod:`scalerl_api.weight_layout`; each is verified before any byte of it reaches the model.
3. If a receive fails (timeout, lost peer, damaged bucket), the worker leaves the group and reports the error. The model
   then has its old weights if no bucket was loaded (``whole``), else a mixture of versions (``partial``) until an update
   succeeds. In both cases the engine can join a new group and start again.

With ``weightSync.backend: Files``, ``fetch`` comes in the place of ``init``: :mod:`.weight_files` reads and verifies the version in a
thread, and the update loads it from memory. Such a failure leaves the old weights.

A failed join or receive is reported, not raised: if several tensor-parallel workers raise an exception, vLLM (0.32) reads
only the first worker's response, and takes the other responses for those to its next calls.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from scalerl_api.paths import RunPaths
from scalerl_api.process import DIR
from scalerl_api.weight_layout import Bucket, check_trailer, lay_out, tensor_bytes
from scalerl_api.wire import TensorSpec, WeightReceive
from scalerl_generator import vllm_failures
from scalerl_generator.checksum import checksum_u8
from scalerl_generator.draft_protocol import DraftTally, PastResponses
from scalerl_generator.merged_adapters import merged_weights
from scalerl_generator.sampling_seed import seed_generators
from scalerl_generator.vllm_cpu_sampler import patch_cpu_sampler
from scalerl_generator.vllm_lifetime import kill_spawned_with_parent
from scalerl_generator.vllm_replies import FetchReport
from scalerl_generator.weight_files import SharedBuckets, WeightFetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig

    from scalerl_generator.vllm_adapters import PublishedAdapters
    from scalerl_generator.vllm_drafts import HistoryProposer

BACKEND = "scalerl"
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable of servers that hold several versions of adapters."""
_POLL_SECONDS = 0.002
_MIN_BROADCAST_SECONDS = 0.1


def register() -> None:
    """Entry point of ``vllm.general_plugins``; vLLM may call it more than once."""
    kill_spawned_with_parent()
    vllm_failures.watch()
    patch_cpu_sampler()
    if RUNTIME_LORA in os.environ:
        from scalerl_generator.vllm_adapters import leave_out_embeddings

        leave_out_embeddings()
    # Silence vLLM's dump of a failed step: it has the whole configuration and every token of every request.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "ScaleRLWeightEngine")


@dataclass
class GroupInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM ships no types
    """``init_info``: :class:`scalerl_api.wire.GroupJoin`. ``rank`` is that of the server's first worker."""

    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_seconds: float

    def __post_init__(self) -> None:
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be gloo or nccl, got {self.backend!r}")
        if not 1 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in 1..{self.world_size - 1} (rank 0 sends), got {self.rank}")


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info``: :class:`scalerl_api.wire.WeightReceive`, ``tensors`` in its array form.

    ``timeout_seconds`` is for all buckets together. ``abort`` ends a started update that will not be sent.
    """

    epoch: int
    version: int
    tensors: list[Any] = field(default_factory=list)
    bucket_bytes: int = 1 << 30
    timeout_seconds: float = 60.0
    adapter_scale: float = 0.0
    files: dict[str, Any] | None = None
    path: str = ""
    """With ``files``, of the memory that has the version (:class:`~.weight_files.SharedBuckets`)."""
    adapters: str = ""
    """Name of the version as a LoRA of vLLM's, of a server that holds several; empty: the version replaces the weights."""
    needed_adapters: list[str] = field(default_factory=list)
    """Names of the others that requests still use."""
    abort: bool = False


@dataclass
class PublishReport:
    """One worker's report of its last update."""

    state: Literal["whole", "partial"] = "whole"
    """``partial``: the model has a mixture of versions."""
    version: int | None = None
    epoch: int | None = None
    """Epoch of the process group."""
    tensors: int = 0
    buckets: int = 0
    bytes: int = 0
    transfer_seconds: float = 0.0
    verify_seconds: float = 0.0
    load_seconds: float = 0.0
    finish_seconds: float = 0.0
    error: str = ""
    """Why the update failed; empty if it has not."""
    held: int | None = None
    """Version of the last complete update."""
    active: bool = False
    """vLLM considers an update open."""


class _ProcessGroup:
    """A process group that opens in a thread, while the engine generates.

    Its operations have a timeout. Neither the constructor nor :meth:`close` blocks: an open waits for the slowest member, and
    NCCL's abort and gloo's destructor wait for operations in progress.
    """

    def __init__(self, init: GroupInit, rank: int, device: torch.device) -> None:
        self.epoch = init.epoch
        self._on_gpu = init.backend == "nccl"
        self._device = device
        self._pg: Any = None
        self._closed = False
        self._timeout_seconds = init.timeout_seconds
        self._deadline = time.monotonic() + init.timeout_seconds
        self._problem: str | None = None
        threading.Thread(
            target=self._open, args=(init, rank), name=f"open-group-{init.epoch}", daemon=True
        ).start()

    def problem(self) -> str | None:
        """Why the group was not opened; empty if it is open, None while it opens."""
        if self._problem is None and time.monotonic() > self._deadline:
            self.close()  # NCCL creates its communicator in the first operation, which has no timeout of its own
        if self._closed:
            return f"the process group of epoch {self.epoch} was not opened in {self._timeout_seconds:g} s"
        return self._problem

    def _open(self, init: GroupInit, rank: int) -> None:
        try:
            with self._device_of_thread():
                self._pg = self._construct(init, rank)
                self._sync(self._pg, init)
        except Exception as error:
            self._problem = f"the process group of epoch {self.epoch} was not opened: {error}"
        else:
            self._problem = ""
        if self._closed or self._problem:
            self._release()

    @contextlib.contextmanager
    def _device_of_thread(self) -> Iterator[None]:
        """Run on the worker's device: a new thread's is the first one, where NCCL would create its communicator. The stream is
        the thread's own, so that it does not wait for the model's."""
        if not self._on_gpu:
            yield
            return
        cuda: Any = torch.cuda  # its streams are untyped
        with cuda.device(self._device), cuda.stream(cuda.Stream()):
            yield

    def _construct(self, init: GroupInit, rank: int) -> Any:
        timeout = timedelta(seconds=init.timeout_seconds)
        client = dist.TCPStore(  # type: ignore[attr-defined]  # absent from its __all__
            init.store_host, init.store_port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        store = dist.PrefixStore(f"scalerl-{init.epoch}", client)  # type: ignore[attr-defined]
        if init.backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
            gloo._timeout = timeout
            address = _local_address_for(init.store_host, init.store_port)
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            return dist.ProcessGroupGloo(store, rank, init.world_size, gloo)
        # If a peer is lost in an operation, PyTorch ends the process by default. With 2 it only aborts the group, and the
        # operation raises. A group reads this variable when it is constructed; vLLM's own groups exist already.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        nccl = dist.ProcessGroupNCCL.Options()
        # Only a fallback: the timeout of `_wait` is shorter.
        nccl._timeout = 4 * timeout + timedelta(minutes=1)
        return dist.ProcessGroupNCCL(store, rank, init.world_size, nccl)

    def _sync(self, pg: Any, init: GroupInit) -> None:
        """The group's first operation: an all-reduce of ones (:class:`scalerl_api.wire.GroupJoin`)."""
        ones = torch.ones(1, device=self._device)
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=init.timeout_seconds)
        self._wait(pg.allreduce([ones], options), init.timeout_seconds)
        if int(ones) != init.world_size:
            raise RuntimeError(f"{int(ones)} ranks took part in the first operation, not {init.world_size}")

    def broadcast(self, buffer: torch.Tensor, timeout_seconds: float) -> None:
        """Receive rank 0's buffer into ``buffer``, once the group is open.

        Raises:
            RuntimeError: a peer is lost, or the timeout has passed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_seconds)
        self._wait(self._pg.broadcast([buffer], options), timeout_seconds)

    def _wait(self, work: Any, timeout_seconds: float) -> None:
        if not self._on_gpu:
            work.wait(timedelta(seconds=timeout_seconds))
            return
        deadline = time.monotonic() + timeout_seconds
        while not work.is_completed():  # NCCL's `wait` only synchronizes streams and has no timeout
            if time.monotonic() > deadline:
                raise RuntimeError(f"an NCCL operation did not complete in {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """Leave the group, also while it opens."""
        self._closed = True
        threading.Thread(target=self._release, name=f"close-group-{self.epoch}", daemon=True).start()

    def _release(self) -> None:
        pg, self._pg = self._pg, None
        if self._on_gpu and pg is not None:
            with self._device_of_thread():
                pg.abort()


def _local_address_for(host: str, port: int) -> str:
    """This machine's address on the route to ``host``. Gloo binds to it, so that it does not resolve the hostname."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: this sends nothing
        return str(ipaddress.ip_address(probe.getsockname()[0]))


class ScaleRLWeightEngine(WeightTransferEngine[GroupInit, UpdateInfo]):  # type: ignore[misc]
    """Receives weights by rank 0's broadcasts, verifies each bucket, and loads it into the model layer by layer."""

    init_info_cls = GroupInit
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: _ProcessGroup | None = None
        self._parameter_names = frozenset(name for name, _ in model.named_parameters())
        self._tied = _tied_layers(model)
        _repack_experts_after_updates(model)
        self._adapters: PublishedAdapters | None = None
        """Those beside base weights that stay as they are; None: updates replace the weights."""
        if vllm_config.lora_config is not None:
            from scalerl_generator.vllm_adapters import PublishedAdapters

            self._adapters = PublishedAdapters(model, vllm_config.lora_config.lora_dtype)
        self.report = PublishReport()
        self.fetcher = WeightFetcher(RunPaths(Path(os.environ.get(DIR, ""))).weights)
        self._mapped: SharedBuckets | None = None
        """The memory of the server's first worker, in the others."""

    def fetch(self, request: WeightReceive) -> None:
        """Start to read a version from files, on the first worker; the server generates meanwhile."""
        if self.parallel_config.rank == 0:
            self.fetcher.start(request)

    def fetched(self, version: int) -> FetchReport:
        """State of the fetch of ``version``."""
        return self.fetcher.report(version) if self.parallel_config.rank == 0 else FetchReport(problem="")

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        """Start to join a group, after leaving the current one, which may still be opening; does not wait for it."""
        self.shutdown()
        self._group = _ProcessGroup(init_info, init_info.rank + self.parallel_config.rank, self.device)

    def join_problem(self, epoch: int) -> str | None:
        """Why the worker is not in the group of ``epoch``; empty if it is, None while the group opens."""
        if self._group is None or self._group.epoch != epoch:
            return f"left the group of epoch {epoch}, for another one or after a failed update"
        return self._group.problem()

    def start_weight_update(self) -> None:
        if self._adapters is not None:
            return
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        report = PublishReport(
            state=self.report.state,
            version=update_info.version,
            epoch=update_info.epoch,
            held=self.report.held,
        )
        try:
            self._receive(update_info, report)
        except Exception as error:
            report.error = (
                f"version {update_info.version}, group epoch {update_info.epoch}: {error} "
                f"(received {report.buckets} bucket(s), weights are {report.state})"
            )
            self._abort_update()
        finally:
            self.report = report

    def _receive(self, info: UpdateInfo, report: PublishReport) -> None:
        if info.abort:
            raise RuntimeError("aborted by the client")
        if (self._adapters is None) == bool(info.adapters):
            raise RuntimeError("the server's --lora-versions and trainer.lora.inFlight contradict each other")
        buckets = lay_out(msgspec.convert(info.tensors, list[TensorSpec]), info.bucket_bytes)
        buffers = self._broadcasts(info, buckets) if info.files is None else self._fetched(info, buckets)
        loaded: set[str] = set()
        adapters: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            t0 = time.perf_counter()
            buffer = next(buffers)
            t1 = time.perf_counter()
            payload, trailer = buffer[: bucket.payload_bytes], buffer[bucket.payload_bytes :]
            words = trailer.view(torch.int64).tolist()
            # What was fetched is verified before the update.
            checksum = words[-1] if info.files is not None else checksum_u8(payload)
            check_trailer(words, info.version, bucket.index, checksum)
            t2 = time.perf_counter()
            # vLLM's loaders keep these views until their layer is complete, so every bucket needs a buffer of its own.
            if info.adapter_scale:
                adapters.update((name, tensor.to(self.device)) for name, tensor in _views(payload, bucket))
            else:
                report.state = "partial"
                loaded |= self._load(_views(payload, bucket))
            report.buckets += 1
            report.tensors += len(bucket.slots)
            report.bytes += bucket.payload_bytes
            report.transfer_seconds += t1 - t0
            report.verify_seconds += t2 - t1
            report.load_seconds += time.perf_counter() - t2
        if self._adapters is not None:
            self._adapters.add(info.adapters, adapters, info.adapter_scale, info.needed_adapters)
            return
        if info.adapter_scale:
            t0 = time.perf_counter()
            report.state = "partial"
            folder, dtype = Path(self.model_config.model), self.model_config.dtype
            loaded = self._load(merged_weights(folder, adapters, info.adapter_scale, dtype, self.device))
            report.load_seconds += time.perf_counter() - t0
        if missing := sorted(self._parameter_names - loaded):
            raise RuntimeError(f"the manifest left {len(missing)} parameter(s) unset: {_listed(missing)}")

    def _broadcasts(self, info: UpdateInfo, buckets: tuple[Bucket, ...]) -> Iterator[torch.Tensor]:
        """Receive the buckets of ``info`` over the group."""
        group = self._group
        if group is None:
            raise RuntimeError("not in a process group: join one with init first")
        if group.epoch != info.epoch:
            raise RuntimeError(f"in the group of epoch {group.epoch}: join the group of the update first")
        if problem := group.problem():
            raise RuntimeError(problem)
        if problem is None:
            raise RuntimeError(f"the group of epoch {info.epoch} is still opening")
        deadline = time.monotonic() + info.timeout_seconds
        for bucket in buckets:
            buffer = torch.empty(bucket.total_bytes, dtype=torch.uint8, device=self.device)
            group.broadcast(buffer, max(deadline - time.monotonic(), _MIN_BROADCAST_SECONDS))
            yield buffer

    def _fetched(self, info: UpdateInfo, buckets: tuple[Bucket, ...]) -> Iterator[torch.Tensor]:
        """The buckets in memory, on the host."""
        reader = self.fetcher.reader
        own = reader.copy
        if own is not None and own.path == info.path:
            if reader.version != info.version:
                raise RuntimeError(f"the copy in memory has version {reader.version}")
            return iter(own.of_bucket)
        if self._mapped is None or self._mapped.path != info.path or self._mapped.buckets != buckets:
            self._mapped = SharedBuckets(buckets, info.path)
        return iter(self._mapped.of_bucket)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors; returns the names of the model's parameters that they set, in whole or in part.

        Raises:
            RuntimeError: the model refuses a tensor, which the message names.
        """
        current = ""

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in tensors:
                current = name
                yield name, tensor

        try:
            return self.model.load_weights(named()) or set()
        except Exception as error:
            raise RuntimeError(
                f"vLLM's {type(self.model).__name__} cannot load the tensor {current!r} (an unknown name, or another shape): "
                f"{type(error).__name__}: {error}"
            ) from error

    def finish_weight_update(self) -> None:
        if self.report.error:  # `_abort_update` has finalized the layers
            return
        started = time.perf_counter()
        if self._adapters is None:
            self._finalize()
        self.report.finish_seconds = time.perf_counter() - started
        self.report.state = "whole"
        self.report.held = self.report.version

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _abort_update(self) -> None:
        """Leave the group, and finalize every layer with its present weights.

        An incomplete layer buffers the weights that it received. They are dropped first, because the next update would count
        them and finish the layer too early.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.shutdown()
        if self._adapters is not None:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self._finalize()

    def _finalize(self) -> None:
        """Process the loaded weights into the form in which layers use them, those of tied layers included.

        A layer that shares another's parameter (a tied LM head) is loaded through that other layer, so vLLM's reload does not
        process it, and its packed copy for the matrix product would keep the old weights.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)


def _repack_experts_after_updates(model: torch.nn.Module) -> None:
    """Pack fused experts for the CPU's kernel whenever they were loaded.

    vLLM (0.32) does so after the first load only, and the kernel would then read weights in the checkpoint's layout as packed
    ones: the model would compute something else, without an error. On GPUs the layout is converted after every load.

    The replaced method runs once for each loaded layer, before vLLM copies the result into the parameters that the kernel
    reads. It does not run for the layers of an aborted update, which keep their packed weights.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None:
            continue
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        if isinstance(method, UnquantizedFusedMoEMethod):
            method.process_weights_after_loading = partial(
                _process_and_pack, method.process_weights_after_loading, method.moe_kernel.fused_experts
            )


def _process_and_pack(process: Callable[[Any], None], experts: Any, layer: torch.nn.Module) -> None:
    process(layer)
    experts.process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """The layers that share a parameter with an earlier layer and keep a processed copy of it."""
    seen: set[int] = set()
    tied: list[Any] = []
    for layer in model.modules():
        own = {id(p) for p in layer._parameters.values() if p is not None}
        if own & seen and hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading"):
            tied.append(layer)
        seen |= own
    return tied


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest


def _views(payload: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in bucket.slots:
        flat = payload[slot.offset : slot.offset + tensor_bytes(slot.tensor)]
        yield slot.tensor.name, flat.view(getattr(torch, slot.tensor.dtype)).view(slot.tensor.shape)


class WorkerExtension:
    """Mix-in of vLLM's worker class (``--worker-extension-cls``), called through ``/collective_rpc`` with string arguments."""

    weight_transfer_engine: ScaleRLWeightEngine
    model_runner: Any
    _weight_update_active: bool

    def scalerl_publish_report(self) -> dict[str, Any]:
        """:class:`PublishReport` of the last update, as a dict."""
        report = self.weight_transfer_engine.report
        report.active = self._weight_update_active
        return asdict(report)

    def scalerl_join_problem(self, epoch: str) -> str | None:
        """Why the worker is not in the group of ``epoch``; empty if it is, None while the group opens."""
        return self.weight_transfer_engine.join_problem(int(epoch))

    def scalerl_fetch(self, encoded: str) -> None:
        """Start to read a version from files; ``encoded`` is base64 of :class:`scalerl_api.wire.WeightReceive`."""
        self.weight_transfer_engine.fetch(
            msgspec.msgpack.decode(base64.b64decode(encoded), type=WeightReceive)
        )

    def scalerl_fetched(self, version: str) -> dict[str, Any]:
        """:class:`~.vllm_replies.FetchReport` of ``version``, as a dict."""
        report: dict[str, Any] = msgspec.to_builtins(self.weight_transfer_engine.fetched(int(version)))
        return report

    def scalerl_seed(self, seed: str) -> None:
        """Seed this worker's random numbers for this start; ``seed`` is in hex. Equal for all tensor-parallel workers."""
        seed_generators(bytes.fromhex(seed))

    def scalerl_attach_proposer(self) -> None:
        """Give the proposer of drafts the model runner, which knows the ids of requests."""
        self._proposer.attach(self.model_runner, get_tensor_model_parallel_rank())

    def scalerl_remember(self, encoded: str) -> None:
        """Add past responses to the drafter's memory; ``encoded`` is base64 of :class:`~.draft_protocol.PastResponses`."""
        past = msgspec.msgpack.decode(base64.b64decode(encoded), type=PastResponses)
        self._proposer.remember(past)

    def scalerl_take_draft_tally(self, prompt_key: str) -> DraftTally:
        """Drafted and accepted tokens of a prompt's requests since the last call."""
        return self._proposer.take_tally(prompt_key)

    def scalerl_draft_report(self) -> dict[str, Any]:
        """:class:`~.draft_protocol.DraftReport` since the server's start, as a dict."""
        return asdict(self._proposer.report)

    @property
    def _proposer(self) -> HistoryProposer:
        proposer: HistoryProposer = self.model_runner.drafter
        return proposer
