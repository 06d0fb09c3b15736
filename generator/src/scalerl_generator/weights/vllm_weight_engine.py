"""vLLM's weight-transfer engine ``scalerl``: a worker receives a version over a process group or from files, verifies it, installs it.

:mod:`.update_client` makes all requests of the protocol:

1. ``init``: the worker joins a process group (:mod:`.receiver_group`), whose rank 0 sends. The group opens in a thread, because it
   waits for its slowest member, and the worker generates meanwhile; the client asks for the outcome.
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

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import safe_open
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from scalerl_api.paths import RunPaths
from scalerl_api.process import DIR
from scalerl_api.weight_layout import Bucket, check_trailer, lay_out, tensor_bytes, tensor_checksum
from scalerl_api.wire import GroupJoin, WeightReceive
from scalerl_generator.weights.receiver_group import ReceiverGroup
from scalerl_generator.weights.update_reports import FetchReport, PublishReport
from scalerl_generator.weights.vllm_layers import ModelLayers
from scalerl_generator.weights.weight_files import SharedBuckets, WeightFetcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from scalerl_generator.weights.vllm_lora_versions import PublishedAdapters


_MIN_BROADCAST_SECONDS = 0.1
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class UpdateInfo(WeightReceive, frozen=True, kw_only=True):
    """``update_info``: the trainer's request, and what the actor adds. ``timeout_seconds`` is for all buckets together."""

    path: str = ""
    """With ``files``, of the memory that has the version (:class:`~.weight_files.SharedBuckets`)."""
    adapters: str = ""
    """Name of the version as a LoRA of vLLM's, of a server that holds several; empty: the version replaces the weights."""
    needed_adapters: list[str] = []
    """Names of the others that requests still use."""
    abort: bool = False
    """Ends a started update that will not be sent."""


class ScaleRLWeightEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]  # vLLM ships no types
    """Receives weights by rank 0's broadcasts, verifies each bucket, and loads it into the model layer by layer."""

    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: ReceiverGroup | None = None
        self._layers = ModelLayers(model, self.model_config)
        self._adapters: PublishedAdapters | None = None
        """Those beside base weights that stay as they are; None: updates replace the weights."""
        if vllm_config.lora_config is not None:
            from scalerl_generator.weights.vllm_lora_versions import PublishedAdapters

            self._adapters = PublishedAdapters(model, vllm_config.lora_config.lora_dtype)
        self.report = PublishReport("whole", None)
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

    def parse_init_info(self, init_dict: dict[str, Any]) -> GroupJoin:
        return msgspec.convert(init_dict, GroupJoin)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return msgspec.convert(update_dict, UpdateInfo)

    def init_transfer_engine(self, init_info: GroupJoin) -> None:
        """Start to join a group, after leaving the current one, which may still be opening; does not wait for it. ``rank`` is that of
        the server's first worker."""
        self.shutdown()
        self._group = ReceiverGroup(init_info, init_info.rank + self.parallel_config.rank, self.device)

    def join_problem(self, epoch: int) -> str | None:
        """Why the worker is not in the group of ``epoch``; empty if it is, None while the group opens."""
        if self._group is None or self._group.epoch != epoch:
            return f"left the group of epoch {epoch}, for another one or after a failed update"
        return self._group.problem()

    def start_weight_update(self) -> None:
        if self._adapters is None:
            self._layers.start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        report = PublishReport(
            state=self.report.state,
            version=update_info.version,
            held=self.report.held,
        )
        try:
            self._load(update_info, report)
        except Exception as error:
            report.error = (
                f"version {update_info.version}, group epoch {update_info.epoch}: {error} "
                f"(received {report.buckets} bucket(s), weights are {report.state})"
            )
            self._abort_update()
        finally:
            self.report = report

    def _load(self, info: UpdateInfo, report: PublishReport) -> None:
        """Verify each bucket and load it, and keep account in ``report``."""
        if info.abort:
            raise RuntimeError("aborted by the client")
        if (self._adapters is None) == bool(info.adapters):
            raise RuntimeError("the server's --lora-versions and trainer.lora.inFlight contradict each other")
        buckets = lay_out(info.tensors, info.bucket_bytes)
        buffers = self._broadcasts(info, buckets) if info.files is None else self._fetched(info, buckets)
        adapters: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            t0 = time.perf_counter()
            buffer = next(buffers)
            t1 = time.perf_counter()
            payload, trailer = buffer[: bucket.payload_bytes], buffer[bucket.payload_bytes :]
            words = trailer.view(torch.int64).tolist()
            # What was fetched is verified before the update.
            checksum = words[-1] if info.files is not None else tensor_checksum(torch, payload)
            check_trailer(words, info.version, bucket.index, checksum)
            t2 = time.perf_counter()
            # vLLM's loaders keep these views until their layer is complete, so every bucket needs a buffer of its own.
            if info.adapter_scale:
                adapters.update((name, tensor.to(self.device)) for name, tensor in _views(payload, bucket))
            else:
                report.state = "partial"
                self._layers.load(_views(payload, bucket))
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
            self._layers.load(merged_weights(folder, adapters, info.adapter_scale, dtype, self.device))
            report.load_seconds += time.perf_counter() - t0
        self._layers.check_complete()

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

    def finish_weight_update(self) -> None:
        if self.report.error:  # `_abort_update` has finished the layers
            return
        started = time.perf_counter()
        if self._adapters is None:
            self._layers.finish()
        self.report.finish_seconds = time.perf_counter() - started
        self.report.state = "whole"
        self.report.held = self.report.version

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _abort_update(self) -> None:
        """Leave the group, with the present weights."""
        self.shutdown()
        if self._adapters is None:
            self._layers.abort()


def _views(payload: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in bucket.slots:
        flat = payload[slot.offset : slot.offset + tensor_bytes(slot.tensor)]
        yield slot.tensor.name, flat.view(getattr(torch, slot.tensor.dtype)).view(slot.tensor.shape)


def merged_weights(
    folder: Path, adapters: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the model in ``folder``, with ``W + scale · B A`` where there is an adapter.

    A publish of adapters has 1 to 2 % of the bytes of one of weights. vLLM then loads whole weights as after any other publish,
    so requests, kernels and the prefix cache do not know adapters, and log-probabilities are those of weights that the trainer
    merged. The base model's are read from the files that the server was started from.

    Args:
        adapters: ``<tensor in the files>/lora_A`` with the shape [rank, inputs], and ``…/lora_B`` with [outputs, rank].
        dtype: in which the trainer has the weights.

    Raises:
        RuntimeError: an adapter is of no tensor in the files.
    """
    pending = {name.rpartition("/")[0] for name in adapters}
    for file in _files(folder):
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                weight = tensors.get_tensor(name)
                if name in pending:
                    pending.remove(name)
                    change = adapters[f"{name}/lora_B"].float() @ adapters[f"{name}/lora_A"].float()
                    # As the trainer merges: from the rounded weight, in float32.
                    weight = weight.to(dtype).float().add(change, alpha=scale).to(dtype)
                yield name, weight
    if pending:
        raise RuntimeError(f"{folder} has no tensor {min(pending)}, of which an adapter was published")


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _WEIGHTS]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]
