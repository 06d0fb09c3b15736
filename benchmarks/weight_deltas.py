"""Bytes of ``weightSync.backend: Files`` beside whole weights, and whether readers that miss versions are exact.

    python benchmarks/weight_deltas.py [--quick] [--size 30] [--versions 50] [--learning-rates 5e-7,1e-6,5e-6] [--store]

A Llama in bfloat16 is trained on the tiny example's text as the trainer does: gradients of bfloat16 weights, AdamW on float32 masters
at a constant rate, gradients clipped to norm 1. First a warm-up at 3e-4, so the optimizer's moments and the losses are those of
training, then some steps at the measured rate, then each step is a version. One reader takes every version, one each with
probability 1/3, one joins at the last. *changed* is the share of weights whose bits differ from the version before; *delta* the bytes
that a reader reads which has that one; *written* what the trainer writes, bases included; each as a share of whole versions. Seconds
are CPU time a GB of weights, of one thread. With ``--store`` the files are in a prefix of moto's S3 server on loopback; a version's
*write_ms* and *read_ms* are wall times of a delta.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from publish import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_api.object_store import ObjectStore
from scalerl_api.weight_files import STORED
from scalerl_generator.weights.weight_files import WeightReader
from scalerl_trainer.models.scratch import llama_config, train_tokenizer
from scalerl_trainer.publish.published_weights import tensor_spec
from scalerl_trainer.publish.weight_folders import StoredFolder, VolumeFolder
from scalerl_trainer.publish.weight_writer import WeightWriter

DATA = Path(__file__).parents[1] / "examples/tiny/data.jsonl"
BUCKET_BYTES = 16 << 20
TOKENS, ROWS = 64, 4
WARM_UP = 30
SETTLING = 12
"""Steps at the measured rate before the first version."""


class Training:
    """bfloat16 weights, and float32 masters that AdamW updates."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        scratch = SIZES[size]
        lines = [str(row) for row in map(json.loads, DATA.read_text().splitlines())]
        tokenizer = train_tokenizer(lines, 512)
        ids = [i for line in lines for i in tokenizer.encode(line).ids]
        self._ids = torch.tensor(ids[: len(ids) // TOKENS * TOKENS]).view(-1, TOKENS)
        config = LlamaConfig(**llama_config(scratch, scratch.vocabulary_size, "bfloat16", 256))
        model = LlamaForCausalLM(config)
        self._masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        self._model = model.bfloat16()
        self._optimizer = torch.optim.AdamW(self._masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> float:
        batch = self._ids[torch.randint(len(self._ids), (ROWS,))]
        loss = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        parameters = list(self._model.parameters())
        for master, parameter in zip(self._masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, parameters, strict=True):
                parameter.copy_(master)
        return float(loss)


def assert_copied(reader: WeightReader, tensors: dict[str, torch.Tensor]) -> None:
    assert reader.copy is not None
    for bucket, memory in zip(reader.copy.buckets, reader.copy.of_bucket, strict=True):
        for slot in bucket.slots:
            own = tensors[slot.tensor.name].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(memory[slot.offset : slot.offset + len(own)], own), slot.tensor.name


def sizes_of(writer: WeightWriter, root: Path) -> dict[str, int]:
    if writer.folder.to:
        return ObjectStore(writer.folder.to).sizes(f"{STORED}/{writer.folder.name}")
    return {path.name: path.stat().st_size for path in (root / writer.folder.name).iterdir()}


def measure(training: Training, rate: float, versions: int, root: Path, to: str) -> dict[str, float]:
    training.set_rate(rate)
    for _ in range(SETTLING):
        training.step()
    tensors = training.tensors()
    manifest = [tensor_spec(name, tensor) for name, tensor in tensors.items()]
    whole = sum(tensor.nbytes for tensor in tensors.values())
    folder = StoredFolder(ObjectStore(to), "0.1-a") if to else VolumeFolder(root / "0.1-a")
    writer = WeightWriter(folder, BUCKET_BYTES, lambda: None)
    every, some = WeightReader(root), WeightReader(root)
    chance, present = random.Random(0), dict[str, int]()
    changed = delta = written = missed = 0.0
    write_seconds = read_seconds = 0.0
    walls: list[tuple[float, float]] = []
    for version in range(versions + 1):
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        training.step()

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

        began, begun = time.thread_time(), time.perf_counter()
        files = writer.write(version, manifest, stream).files
        wrote, written_at = time.thread_time(), time.perf_counter()
        size = every.read(version, manifest, BUCKET_BYTES, files)
        read = time.thread_time()
        walls.append((written_at - begun, time.perf_counter() - written_at))
        new = {name: size for name, size in sizes_of(writer, root).items() if name not in present}
        present |= new
        assert_copied(every, tensors)
        if chance.random() < 1 / 3:
            some.read(version, manifest, BUCKET_BYTES, files)
            assert_copied(some, tensors)
        else:
            missed += 1
        if version == 0:
            first = sum(new.values())
            continue
        written += sum(new.values())
        delta += size
        write_seconds += wrote - began
        read_seconds += read - wrote
        changed += sum(
            int((tensor.view(torch.int16) != before[name].view(torch.int16)).sum())
            for name, tensor in tensors.items()
        )
    late = WeightReader(root)
    late_bytes = late.read(versions, manifest, BUCKET_BYTES, files)
    assert_copied(late, tensors)
    gigabytes = versions * whole / 1e9
    return {
        "changed": changed / versions / (whole / 2),
        "delta": delta / versions / whole,
        "written": written / versions / whole,
        "written_with_the_first": (written + first) / (versions + 1) / whole,
        "late_reader": late_bytes / whole,
        "on_the_volume": sum(sizes_of(writer, root).values()) / whole,
        "versions_missed": missed,
        "write_seconds_per_gb": write_seconds / gigabytes,
        "read_seconds_per_gb": read_seconds / gigabytes,
        "write_ms": 1e3 * float(np.median([write for write, _ in walls])),
        "read_ms": 1e3 * float(np.median([read for _, read in walls])),
    }


@contextlib.contextmanager
def stored(wanted: bool, root: Path) -> Iterator[str]:
    """A prefix of a new server; empty if none is wanted."""
    if not wanted:
        yield ""
        return
    sys.path += [str(Path(__file__).resolve().parents[1] / p) for p in ("trainer/tests", "tests/support")]
    from s3_server import BUCKET, S3Server

    server = S3Server(root / "server.log")
    os.environ.update(server.environ)
    try:
        yield f"s3://{BUCKET}/run"
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the smallest model, within a minute")
    parser.add_argument("--size", type=int, default=30, choices=SIZES, help="millions of parameters")
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--learning-rates", default="5e-7,1e-6,5e-6")
    parser.add_argument("--store", action="store_true", help="through an object store")
    arguments = parser.parse_args()
    size = 1 if arguments.quick else arguments.size
    training = Training(size)
    losses = [training.step() for _ in range(WARM_UP)]
    print(f"{size} M parameters, loss {losses[0]:.2f} to {losses[-1]:.2f} in the warm-up")
    figures: dict[str, float] = {}
    for text in arguments.learning_rates.split(","):
        with tempfile.TemporaryDirectory() as root, stored(arguments.store, Path(root)) as to:
            found = measure(training, float(text), arguments.versions, Path(root), to)
        print(f"{text:>6}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
        figures |= {f"{text}_{name}": round(value, 5) for name, value in found.items()}
    print(json.dumps({"benchmark": "weight_deltas", "figures": figures}))


if __name__ == "__main__":
    main()
