"""One rank of the engine's tests: runs every scenario, writes its results to ``<out>/rank-<r>.pt``.

All scenarios share one process per rank because importing torch, transformers and DeepSpeed takes longer than they do.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.utils import groups
from engines_and_stages import COPIED, SKIPPED, Stage, engine_of
from safetensors.torch import load_file

from scalerl_api.load import load_run
from scalerl_api.memory.model_size import Dtype
from scalerl_api.spec import PromptSpec
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer import packing
from scalerl_trainer.algo.losses import Cispo, Loss, LossOutput, TokenBatch
from scalerl_trainer.background import in_background
from scalerl_trainer.checkpoints.engine_files import Piece
from scalerl_trainer.checkpoints.host_copy import HostBuffers
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.engine.backend import open_backend
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.export import write_model
from scalerl_trainer.models import load_model
from scalerl_trainer.packing import Sequence
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.sft import train_supervised
from scalerl_trainer.tensor_files import TensorInfo

EXAMPLE = Path(__file__).parents[2] / "examples/tiny/run.yaml"
STEPS = 3
TIMEOUT_SECONDS = 240
VOCABULARY = 17
SETTINGS = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "max_gradient_norm": 0.05,
    "micro_batch_tokens": 24,
    "temperature": 0.8,
    "epsilon": 1e-8,
    "logit_chunk_bytes": 4 * 64 * 7,
}


def whole_batch(step: int) -> dict[str, Any]:
    """The same on every rank and in the reference: 7 sequences, one without trainable tokens, forced tokens."""
    generator = torch.Generator().manual_seed(100 + step)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    shapes = [(3, 9), (2, 4), (5, 1), (4, 12), (1, 6), (2, 3), (6, 8)]
    sequences = []
    for number, (prompt, completion) in enumerate(shapes):
        trainable = [True] * completion
        if number == 3:
            trainable[4:9] = [False] * 5
        if number == 5:
            trainable = [False] * completion
        sequences.append(Sequence(ids(prompt), ids(completion), trainable))
    lengths = [sum(s.trainable or []) for s in sequences]
    count = len(sequences)
    return {
        "sequences": sequences,
        "lengths": lengths,
        "advantages": torch.randn(count, generator=generator),
        "weights": torch.rand(count, generator=generator) / 20,
        "generator": [-4 + 0.7 * torch.randn(n, generator=generator) for n in lengths],
    }


def share(step: int, rank: int, world: int) -> TrainBatch:
    """Ranks get different numbers of sequences and so of micro-batches."""
    batch = whole_batch(step)
    mine = list(range(7)) if world == 1 else [[0, 2, 3, 4, 5], [1, 6]][rank]
    return TrainBatch(
        [batch["sequences"][i] for i in mine],
        batch["weights"][mine],
        batch["advantages"][mine],
        torch.cat([batch["generator"][i] for i in mine]),
        torch.cat([torch.full((batch["lengths"][i],), i % 2 == 0) for i in mine]),
    )


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for bucket in engine.weights.gather_parameters(40_000):
        found.update({n: t.float().clone() for n, t in zip(bucket.names, bucket.tensors, strict=False)})
    return found


class PoisonedGradient:
    """A finite loss whose gradient is not: the slope of a square root at zero."""

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput((tokens.logprobs_n - tokens.logprobs_n.detach()).abs().sqrt().sum())


class PoisonedLoss:
    def __call__(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput(tokens.logprobs_n.sum() * float("nan"))


class Products(torch.nn.Module):
    """Its gradient is its input. The number of its parameters is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.last = torch.nn.Parameter(torch.zeros(65))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum() + (self.last * gradient[0]).sum()


class Pair(torch.nn.Module):
    """A parameter that every pass reaches, and one that only some do; the gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(64))
        self.second = torch.nn.Parameter(torch.zeros(64))

    def forward(self, gradient: torch.Tensor, both: bool) -> torch.Tensor:
        reached = (self.first, self.second) if both else (self.first,)
        return torch.stack([(each * gradient).sum() for each in reached]).sum()


def caught(action: Callable[[], object]) -> str:
    try:
        action()
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Scenarios:
    def __init__(self, model: str, out: Path, rank: Rank, device: torch.device) -> None:
        self.model, self.out, self.rank, self.device = model, out, rank, device

    def engine(self, stage: Stage, dtype: Dtype = "float32", **changes: Any) -> Engine:
        gc.freeze()  # ZeRO 3 collects garbage three times an engine, in half a second over all that was imported
        settings = EngineSettings(**engine_of(stage), dtype=dtype, **{**SETTINGS, **changes})
        return Engine(load_model(self.model, dtype="float32"), settings, self.device)

    def share(self, step: int) -> TrainBatch:
        return share(step, self.rank.rank, self.rank.world)

    def train(self, stage: Stage, dtype: Dtype = "float32", **changes: Any) -> dict[str, Any]:
        """Steps, log-probabilities, save and resume in the middle."""
        engine = self.engine(stage, dtype, **changes)
        stats = [engine.step(self.share(step), Cispo()) for step in range(STEPS - 1)]
        folder = self.out / f"state-{stage}-{dtype}-{len(changes)}"
        if self.rank.rank == 0:
            folder.mkdir()
        torch.distributed.barrier()
        engine.save(folder)
        stats.append(engine.step(self.share(STEPS - 1), Cispo()))
        logprobs = engine.logprobs([] if self.rank.rank else whole_batch(0)["sequences"])
        final = parameters(engine)
        engine.close()
        exported = self.out / f"exported-{folder.name}"
        if self.rank.rank == 0:
            infos = [TensorInfo(name, getattr(torch, dtype), tuple(t.shape)) for name, t in final.items()]
            write_model(exported, Path(self.model), infos, iter(final.values()), load_run(EXAMPLE).spec)

        resumed = self.engine(stage, dtype, **changes)
        resumed.load(folder)
        resumed.step(self.share(STEPS - 1), Cispo())
        again = parameters(resumed)
        resumed.close()
        shutil.rmtree(folder, ignore_errors=True)
        return {
            "stats": stats,
            "logprobs": logprobs,
            "parameters": final,
            "resumed": again,
            "resumed_steps": resumed.steps_done,
            "exported": exported,
        }

    def reduced(self, stage: Stage, dtype: Dtype) -> tuple[list[float], float, int]:
        """The distinct gradients after one step of two micro-batches (Adam's first moment holds a tenth of them), their norm, and
        the number of values that were all-reduced. Each contribution is exact in bfloat16, no sum of any two is."""
        settings = EngineSettings(**engine_of(stage), dtype=dtype, max_gradient_norm=0.0)
        engine = open_backend(Products(), settings, self.device)
        all_reduce = torch.distributed.all_reduce
        with patch.object(torch.distributed, "all_reduce", wraps=all_reduce) as reduced:
            for gradients in ((1.0, 2**-9), (2**-11, 2**-13)):
                value = torch.full((64,), gradients[self.rank.rank], dtype=getattr(torch, dtype))
                engine.backward(engine(value))
            norm = engine.step(1e-3)
        moments = torch.cat([piece.values["exp_avg"] for piece in engine.pieces(owned=False)])
        engine.close()
        values = sum(call.kwargs["tensor"].numel() for call in reduced.call_args_list)
        return sorted({round(m / 0.1, 6) for m in moments.double().tolist() if m}), norm, values

    def unreached(self, stage: Stage) -> list[float]:
        """Gradient norms of steps with passes that reach both parameters, or only the first."""
        settings = EngineSettings(**engine_of(stage), dtype="float32", max_gradient_norm=0.0)
        engine = open_backend(Pair(), settings, self.device)
        norms = []
        for passes in ((True,), (False,), (False, True), (False, True), (False,)):
            for both in passes:
                engine.backward(engine(torch.ones(64), both))
            norms.append(engine.step(1e-3))
        engine.close()
        return norms

    def skip(self, stage: Stage, dtype: Dtype) -> dict[str, Any]:
        """Steps that all ranks must skip, in turn on one engine: weights and optimizer are unchanged."""
        good, after = self.share(0), self.share(1)
        # One token of one rank's that no mean survives, and a batch of other weights.
        one = good.generator_logprobs_n.clone()
        if self.rank.rank == 1:
            one[0] = -9999.0
        outlier = TrainBatch(good.sequences, good.weights_s, good.advantages_s, one)
        far = TrainBatch(good.sequences, good.weights_s, good.advantages_s, good.generator_logprobs_n - 40)
        undisturbed = self.engine(stage, dtype)
        undisturbed.step(good, Cispo())
        middle = parameters(undisturbed)
        undisturbed.step(after, Cispo())
        expected = parameters(undisturbed)
        undisturbed.close()

        engine = self.engine(stage, dtype)
        engine.step(good, Cispo())
        poisons: list[tuple[str, TrainBatch, Loss]] = [
            ("gradient", good, PoisonedGradient()),
            ("loss", good, PoisonedLoss()),
            ("ratio", far, Cispo()),
        ]
        found: dict[str, Any] = {}
        unclipped = self.engine(stage, dtype, max_gradient_norm=0.0)
        found["gradient not clipped"] = unclipped.step(good, PoisonedGradient())
        unclipped.close()
        for name, batch, loss in poisons:
            stats = engine.step(batch, loss)
            found[name] = stats
            found[f"{name} unchanged"] = _same(middle, parameters(engine))
        stats = engine.step(after, Cispo())
        found["after"] = stats
        found["continues"] = _same(expected, parameters(engine))
        found["outlier"] = engine.step(outlier, Cispo())
        engine.close()
        return found

    def unlike(self, stage: Stage) -> dict[str, dict[str, torch.Tensor]]:
        """Parameters after a step in which rank 0 alone computes a prompt once, and after the same step without that; with an epsilon
        at which no gradient counts by its sign alone."""
        rank, found = self.rank.rank, dict[str, dict[str, torch.Tensor]]()
        sequences = [Sequence([3 + rank * n, *range(4, 16)], [3 + n, 4, 5]) for n in range(6)]
        batch = TrainBatch(sequences, torch.full((6,), 1 / 36), torch.linspace(-1, 1, 6) + rank)
        for shares in (True, False):
            engine = self.engine(stage, micro_batch_tokens=112, warmup_steps=0, epsilon=1e-3)
            engine._checks._follows = engine._checks.shares_prompts() and shares
            layout = [micro.prompts_gp is not None for micro in engine.pack(batch).packed.micro_batches]
            assert any(layout) == (shares and rank == 0 and stage < 2), layout
            engine.step(batch, Cispo())
            found["shared" if shares else "whole"] = parameters(engine)
            engine.close()
        return found

    def refuse(self, stage: Stage) -> dict[str, Any]:
        """Errors that all ranks must raise, without a change of the weights."""
        engine = self.engine(stage)
        before = parameters(engine)
        good = self.share(0)
        nan = (
            torch.full_like(good.generator_logprobs_n, float("nan"))
            if self.rank.rank
            else good.generator_logprobs_n
        )
        bad = TrainBatch(good.sequences, good.weights_s, good.advantages_s, nan)
        long = TrainBatch([Sequence([1] * 20, [2] * 20)], torch.ones(1), torch.ones(1))
        strange = TrainBatch([Sequence([1], [VOCABULARY + 500])], torch.ones(1), torch.ones(1))
        empty = TrainBatch([], torch.zeros(0), torch.zeros(0), torch.zeros(0))
        found: dict[str, Any] = {
            "nan generator": caught(lambda: engine.step(bad, Cispo())),
            "too long": caught(lambda: engine.step(long if self.rank.rank else good, Cispo())),
            "strange": caught(lambda: engine.step(strange if self.rank.rank else good, Cispo())),
            "empty": engine.step(empty, Cispo()),
        }
        after_bad_batches = parameters(engine)
        stats = engine.step(good, Cispo())
        found["usable after bad batches"] = stats.applied
        found["unchanged"] = _same(before, after_bad_batches)
        engine.close()
        return found

    def warm(self, stage: Stage) -> dict[str, Any]:
        """Supervised steps lower the loss; their end resets the optimizer."""
        engine = self.engine(stage, learning_rate=1e-3, max_gradient_norm=1.0, temperature=1.0)
        tokenizer = ModelTokenizer(Path(self.model), PromptSpec())
        pairs = [(tokenizer.encode([f"{i} + {i} ="])[0], f" {2 * i}") for i in range(8)]
        losses: list[float] = []
        common = {"batch_size": 8, "ranks": Ranks(self.rank.rank, self.rank.world, 60)}
        result = train_supervised(
            engine, tokenizer, pairs, steps=60, learning_rate=5e-3, **common,
            on_step=lambda _, stats, __: losses.append(stats.loss) or False,
        )  # fmt: skip
        stopped = train_supervised(
            engine, tokenizer, pairs, steps=200, learning_rate=5e-3, stop_at=0.5, **common
        )  # fmt: skip
        state = [v for s in engine._backend._base_optimizer.state.values() for v in s.values()]
        clean = all(not bool(v.any()) for v in state)
        engine.close()
        return {
            "losses": losses,
            "result": (result.steps, result.tokens, result.loss, result.solved),
            "stopped": (stopped.steps, stopped.tokens, stopped.loss, stopped.solved),
            "clean": clean,
            "steps_done": engine.steps_done,
        }

    def beside(self, stage: Stage, dtype: Dtype, *, waits: bool) -> dict[str, Any]:
        """Weights read on a thread that has read one tensor when a step begins, and reads on once the update may come.

        ``waits``: the update waits for the thread; otherwise the thread reads on after the update.
        """
        engine = self.engine(stage, dtype)
        engine.step(self.share(0), Cispo())
        before = {n: t.clone() for n, t in engine.weights.gather_checkpoint(4000)}
        first, resumed, found = threading.Event(), threading.Event(), dict[str, torch.Tensor]()

        def read() -> None:
            for name, tensor in engine.weights.gather_checkpoint(4000):
                found[name] = tensor.clone()
                first.set()
                assert resumed.wait(TIMEOUT_SECONDS)

        reading = in_background("read", read, self.device)

        def may_update() -> None:
            resumed.set()
            reading.result()

        if waits:
            engine.before_update = may_update
        assert self.rank.rank or first.wait(TIMEOUT_SECONDS)
        stats = engine.step(self.share(1), Cispo())
        may_update()
        after = {n: t.clone() for n, t in engine.weights.gather_checkpoint(4000)}
        engine.close()
        return {"before": before, "found": found, "after": after, "applied": stats.applied}

    def copied(self, stage: Stage, dtype: Dtype, change: str = "step") -> dict[str, Any]:
        """A checkpoint's file of this rank, and its state before and after what comes next, which the copy waits for.

        A step releases the copy once its gradients are there; the copy then takes its time, for which the update is to wait.
        """
        engine = self.engine(stage, dtype)
        if change == "proximal":
            engine.keep_proximal(load_model(self.model, dtype="float32"))
            engine.set_proximal()
        engine.step(self.share(0), Cispo())
        before, released, copy_all = _state(engine), threading.Event(), HostBuffers._copy_all

        def slowly(buffers: HostBuffers, pieces: list[Piece]) -> list[Piece]:
            assert released.wait(TIMEOUT_SECONDS)
            time.sleep(0.3)
            return copy_all(buffers, pieces)

        with patch.object(HostBuffers, "_copy_all", slowly):
            state = engine.copy_state()
            if change == "step":
                engine.before_update = released.set
                stats = engine.step(self.share(1), Cispo())
                assert stats.applied
                assert stats.seconds["copy"] > 0
            else:
                released.set()
                {"proximal": engine.set_proximal, "reset": engine.reset_optimizer}[change]()
                assert engine._waited["copy"] > 0  # which the next step reports
        after, folder = _state(engine), self.out / f"copied-{stage}-{dtype}-{change}-{self.rank.rank}"
        folder.mkdir()
        found = load_file(state.write(folder)[0])
        engine.close()
        return {"kept": _same(before, found), "changed": not _same(before, after)}


def _state(engine: Engine) -> dict[str, torch.Tensor]:
    """This rank's part of what a checkpoint has, under the names of its file."""
    return {
        f"{piece.name}@{piece.start}/{key}": values.clone()
        for piece in engine._trained.pieces(engine._proximal)
        for key, values in piece.values.items()
    }


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main() -> None:
    torch.set_num_threads(1)
    model, out = sys.argv[1], Path(sys.argv[2])
    rank = Rank.from_environment(os.environ)
    device = init_process_group(rank, device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    scenarios = Scenarios(model, out, rank, device)
    compilers = [name for name in ("gcc", "g++", "cc", "c++", "ninja", "nvcc") if shutil.which(name)]
    results: dict[str, Any] = {"compilers": compilers}
    stages: list[Stage] = [*range(4), "FSDP2", "3 optimizer", "3 offload", "FSDP2 offload"]
    for stage in stages:
        results[f"train {stage}"] = scenarios.train(stage)
    for stage in stages[3:5]:
        results[f"checkpointed {stage}"] = scenarios.train(stage, activation_checkpointing=True)
    for stage in stages[1:]:
        results[f"bfloat16 {stage}"] = scenarios.train(stage, "bfloat16")
    for stage in stages:
        results[f"reduced {stage}"] = scenarios.reduced(stage, "bfloat16" if stage else "float32")
        results[f"unreached {stage}"] = scenarios.unreached(stage)
    packing._MICRO_BATCH_POSITIONS = 0  # so that it pays for these few tokens
    for stage in range(3):
        results[f"unlike {stage}"] = scenarios.unlike(stage)
    for stage in (0, 1, 3, "FSDP2"):
        results[f"refuse {stage}"] = scenarios.refuse(stage)
    for stage, dtype in SKIPPED:
        results[f"skip {stage} {dtype}"] = scenarios.skip(stage, dtype)
    for stage in range(3):
        for waits in (True, False):
            dtype: Dtype = "bfloat16" if stage == 2 else "float32"
            results[f"beside {stage} {waits}"] = scenarios.beside(stage, dtype, waits=waits)
    for stage, dtype in COPIED:
        results[f"copied {stage} {dtype}"] = scenarios.copied(stage, dtype)
    for change in ("proximal", "reset"):
        results[f"copied {change}"] = scenarios.copied(1, "bfloat16", change)
    results["warm"] = scenarios.warm(1)
    results["timeout"] = groups._get_data_parallel_group()._get_backend(device).options._timeout
    torch.save(results, out / f"rank-{rank.rank}.pt")
    destroy_process_group()


if __name__ == "__main__":
    main()
