"""Steps of the real engine on one rank, and weights through files, for ``gpu_check``."""

from __future__ import annotations

import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.checkpoints.engine_files import Piece
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.models.lora import PUBLISHED, Lora
from scalerl_trainer.packing import Sequence
from support.gpu_device import Options, clock, open_device, require
from support.gpu_memory import Peaks, memory_of
from support.gpu_models import SHAPES, TINY, Shape, make, make_moe

BUCKET_BYTES = 64 << 20
MEMORY_SECONDS: Final = 65.0
"""After which ``check_memory`` begins no other case."""
LAST_CASE_SECONDS: Final = 20.0
"""That a case may take beyond it, so that those before are kept."""
_RECOMPUTED: Final = {"activation_checkpointing": True}
MEMORY_CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "8B, FSDP2, checkpointing": ("8B", {"engine": "FSDP2", "zero_stage": 3} | _RECOMPUTED),
    "8B, ZeRO 3, checkpointing": ("8B", {"zero_stage": 3} | _RECOMPUTED),
    "1.5B, FSDP2, checkpointing": ("1.5B", {"engine": "FSDP2", "zero_stage": 3} | _RECOMPUTED),
    "1.5B, FSDP2": ("1.5B", {"engine": "FSDP2", "zero_stage": 3}),
    "1.5B, ZeRO 1": ("1.5B", {"zero_stage": 1}),
    "1.5B, ZeRO 1, checkpointing": ("1.5B", {"zero_stage": 1} | _RECOMPUTED),
    "0.5B, ZeRO 0, float32": ("0.5B", {"zero_stage": 0, "dtype": "float32"} | _RECOMPUTED),
    "1.5B, ZeRO 3": ("1.5B", {"zero_stage": 3}),
}
"""In an order in which the first tell most: of layers as wide as those of an 8B model, the backward pass is the largest moment."""


def check_engine(options: Options, way: str, offload: str = "None") -> dict[str, Any]:
    """Steps of a dense model under DeepSpeed or FSDP2, the last beside a copy of the state."""
    if way.startswith("ZeRO"):
        require("deepspeed")
    shape = (TINY if options.tiny else SHAPES)["0.5B"]
    stage = 3 if way == "FSDP2" else int(way[-1])
    engine = "FSDP2" if way == "FSDP2" else "DeepSpeed"
    changed = {"engine": engine, "zero_stage": stage, "offload": offload, "activation_checkpointing": True}
    return _trained(options, make, shape, changed, copies=True)


def check_lora(options: Options) -> dict[str, Any]:
    """Adapters of all linear layers, trained and gathered for a publish."""
    shape = (TINY if options.tiny else SHAPES)["1.5B"]
    return _trained(
        options, make, shape, {"engine": "FSDP2", "zero_stage": 3, "lora": Lora(rank=8, alpha=16)}
    )


def check_moe(options: Options) -> dict[str, Any]:
    """A mixture of eight experts, two of them for each token."""
    shape = (TINY if options.tiny else SHAPES)["MoE"]
    result = _trained(options, make_moe, shape, {"engine": "FSDP2", "zero_stage": 3})
    if not result["routing"]:
        raise AssertionError(f"no router was found: {json.dumps(result)}")
    return result


def check_memory(options: Options) -> dict[str, Any]:
    """Memory by the parts of a step, beside the estimate, as many cases as the time allows.

    Each is in a process of its own: DeepSpeed keeps the first process group and its engines' tensors until a process ends.
    """
    require("deepspeed")
    open_device(options)
    begin, shapes = time.monotonic(), TINY if options.tiny else SHAPES
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers"])
    found: dict[str, Any] = {}
    failed = []
    for name, (shape, changed) in MEMORY_CASES.items():
        left = begin + MEMORY_SECONDS - time.monotonic()
        if left < 0:
            found[name] = "the time was over"
            continue
        pool = ProcessPoolExecutor(1, context)
        try:
            case = pool.submit(_trained, options, make, shapes[shape], changed, steps=2)
            found[name] = case.result(left + LAST_CASE_SECONDS)
            pool.shutdown()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:2000]
            failed.append(name)
            pool.shutdown(wait=not isinstance(error, TimeoutError))
    return found | ({"status": "failed", "reason": f"failed: {', '.join(failed)}"} if failed else {})


def _trained(
    options: Options,
    make_model: Any,
    shape: Shape,
    changed: dict[str, Any],
    steps: int = 3,
    copies: bool = False,
) -> dict[str, Any]:
    open_device(options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rank = Rank(0, 1, 0, "127.0.0.1", probe.getsockname()[1])
    device = init_process_group(
        rank, device="cuda" if options.device == "cuda" else "cpu", timeout_seconds=80
    )
    model = make_model(shape, torch.device("cpu") if options.tiny else device, torch.bfloat16)
    names = {name for name, _ in model.named_parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = shape.rows * shape.sequence
    given: dict[str, Any] = {"learning_rate": 1e-4, "warmup_steps": 0, "micro_batch_tokens": tokens}
    settings = EngineSettings(**given | changed)
    engine = Engine(model, settings, device)
    del model
    peaks = Peaks(engine, device) if device.type == "cuda" else None
    sequences = _sequences(shape)
    before = engine.logprobs(sequences).logprobs_n
    count = len(before)
    batch = TrainBatch(
        sequences, torch.full((len(sequences),), 1 / count), torch.ones(len(sequences)), before
    )
    stats = []
    for _ in range(steps):
        begin = clock(device)
        done = engine.step(batch, Cispo())
        stats.append((done, clock(device) - begin))
    after = engine.logprobs(sequences).logprobs_n
    first, last = stats[0][0], stats[-1][0]
    result: dict[str, Any] = {
        "tokens": last.tokens,
        "attention": engine.config._attn_implementation,
        "first_ratio_max": first.ratios.ratio_max if first.ratios is not None else None,
        "gradient_norms": [done.gradient_norm for done, _ in stats],
        "routing": last.routing,
        "logprob_gain": float((after - before).mean()),
        "step_seconds": stats[-1][1],
        "tokens_per_second": last.tokens / stats[-1][1],
        **memory_of(engine, settings, parameters, peaks),
    }
    if copies:
        result["copy_wait_seconds"] = _copied(engine, batch)
    if settings.lora is None:
        wrong = {n for bucket in engine.weights.gather_parameters(BUCKET_BYTES) for n in bucket.names} ^ names
    else:
        expected = {name for name, _ in engine.weights.adapter_shapes(PUBLISHED)}
        wrong = {name for name, _ in engine.weights.gather_adapters(PUBLISHED)} ^ expected
        result["adapter_tensors"] = len(expected)
    engine.close()
    destroy_process_group()
    if wrong:
        raise AssertionError(f"{sorted(wrong)[:3]} gathered or missing")
    if not result["logprob_gain"] > 0:
        raise AssertionError(f"rewarded tokens did not become likelier: {json.dumps(result)}")
    return result


def _copied(engine: Engine, batch: TrainBatch) -> float:
    """Copy the state to the host beside a step, as for a checkpoint; returns for how long the update waited.

    Raises ``AssertionError`` if the copy has something else than the state before the step.
    """

    def values(pieces: Iterable[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"{p.name}@{p.start}/{key}", value) for p in pieces for key, value in p.values.items())

    before = {name: value.detach().to("cpu", copy=True) for name, value in values(engine._trained.pieces())}
    state = engine.copy_state()
    waited = engine.step(batch, Cispo()).seconds["copy"]
    found = dict(values(state.pieces()))
    wrong = [name for name in before.keys() | found if not torch.equal(before[name], found[name])]
    if wrong:
        raise AssertionError(f"the copy of {sorted(wrong)[:3]} is not the state before the step")
    return waited


def _sequences(shape: Shape) -> list[Sequence]:
    """Of uneven lengths, so that a kernel for them has something to pack, and as many as fill two micro-batches: the second has the
    gradients of the first beside it. The last token of a sequence is not computed."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2 * shape.rows):
        for part in (2, 4, 8, 8):
            length = shape.sequence // part + 1
            ids = torch.randint(3, shape.vocabulary, (length,), generator=generator).tolist()
            found.append(Sequence(ids[: length // 4], ids[length // 4 :]))
    return found


def check_files(options: Options) -> dict[str, Any]:
    """Versions of weights on the device through files: a base, and a delta after an update, read bit by bit."""
    from scalerl_generator.weights.weight_files import WeightReader
    from scalerl_trainer.publish.published_weights import tensor_spec
    from scalerl_trainer.publish.weight_folders import VolumeFolder
    from scalerl_trainer.publish.weight_writer import WeightWriter

    device = open_device(options)
    shape = (TINY if options.tiny else SHAPES)["0.5B"]
    model = make(shape, device, torch.bfloat16)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    manifest = [tensor_spec(name, tensor) for name, tensor in tensors.items()]

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    result: dict[str, Any] = {"bytes": sum(tensor.nbytes for tensor in tensors.values())}
    with tempfile.TemporaryDirectory() as folder:
        writer = WeightWriter(VolumeFolder(Path(folder) / "0.1-a"), BUCKET_BYTES, lambda: None)
        reader = WeightReader(Path(folder))
        for version in (1, 2):
            begin = clock(device)
            written = writer.write(version, manifest, stream)
            wrote = clock(device)
            reader.read(version, manifest, BUCKET_BYTES, written.files)
            result[f"version {version}"] = {
                "write_seconds": wrote - begin,
                "read_seconds": clock(device) - wrote,
                "bytes": written.bytes,
            }
            assert reader.copy is not None
            for bucket, memory in zip(reader.copy.buckets, reader.copy.of_bucket, strict=True):
                for slot in bucket.slots:
                    own = tensors[slot.tensor.name]
                    found = memory[slot.offset : slot.offset + own.nbytes].view(own.dtype).view(own.shape)
                    if not torch.equal(found.to(device), own):
                        raise AssertionError(f"{slot.tensor.name} of version {version} was read differently")
            for tensor in tensors.values():  # about the share of bits that an update at 1e-6 changes
                tensor.mul_(1 + 2**-7 * (torch.rand_like(tensor, dtype=torch.float32) < 0.012))
    return result
