"""What runs on this machine's GPU, how exactly and how fast. No network; at most ten minutes on one GPU.

    python benchmarks/gpu_check.py [--device cuda|cpu] [--tiny] [--only NAME,...] [--out FILE] [--list]

It needs torch and transformers, pydantic, msgspec and numpy; neither an installation of this project nor DeepSpeed or vLLM: what
cannot run without them says so, and the rest runs. Each check is a process of its own with a deadline, so that one that
crashes or hangs costs nothing but itself. All but the last three take at most 90 s. What settles most comes first:

============ =====================================================================================================
machine      versions, device, driver, speed of a bfloat16 matrix product
positions    the trainer's log-probabilities in bfloat16 beside plain transformers, by position, for three kinds of models
attention    torch's variable-length kernel: outputs, gradients, time beside ``sdpa`` of each sequence alone, and in a model
head         the float32 head: errors of log-probabilities and gradients, time, also without kernels, cast to float32, in bfloat16
engine-FSDP2 the engine on one rank: loss, log-probabilities, gathered weights, memory beside the estimate
engine-ZeRO1 the same under DeepSpeed, if that is there
engine-ZeRO3 the same
offload      the same under FSDP2, with parameters and optimizer state in the host's memory
offload-ZeRO the same under ZeRO 3, with optimizer state there
step-0.5B    a training step of that shape beside plain transformers: tokens/s, share of the peak, memory, share of the head
step-1.5B    the same
step-8B      the same of four layers of Llama 3 8B
files        weights through files: a base and a delta, written from the device and read bit by bit
lora         steps of low-rank adapters
moe          steps of a mixture of experts
memory       bytes by the parts of a step, beside the estimate, of wide layers and of all stages
group-1      the process group of weight updates, of one process
group-2      the same of two processes, each on a device of its own where there are two
vllm         vLLM beside the trainer: start, log-probabilities, updates through files, pause, tokens/s; 150 s at most
publish      vLLM: ``benchmarks/publish.py --quick``
run          vLLM: the tiny example, shortened
============ =====================================================================================================

The result is JSON, in ``benchmarks/results/`` by device and day unless ``--out`` says where, and is written after each check. ``--device cpu --tiny`` runs
all of it at tiny shapes. Exit code 1 when a check failed; those that could not run fail nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for member in (
    "processes",
    "api",
    "tasks",
    "trainer",
    "coordinator",
    "curvefit",
    "generator",
    "lifecycle",
    "autoscaling",
    "local",
    "operator",
    "analysis",
    "cli",
    "extras",
):
    if importlib.util.find_spec(f"scalerl_{member}") is None:
        sys.path.insert(0, str(HERE.parent / member / "src"))
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from support.gpu_device import (  # noqa: E402
    CannotRun,
    Options,
    clock,
    need_devices,
    open_device,
    peak_bytes,
    require,
    seconds_of,
)

TOTAL_SECONDS = 570.0
POSITIONS = (0, 256, 1024, 4096, 8192)
TOLERANCE = 0.02
"""Mean difference of a log-probability, in nats, that rounding explains; a rotary table in bfloat16 gives .1 to 2."""

GRADIENT_TOLERANCE = 0.01
"""Error of a gradient of the float32 head, of its norm: rounding to bfloat16 gives .002."""


# --- the checks ------------------------------------------------------------------------------------------


def check_machine(options: Options) -> dict[str, Any]:
    import torch
    import transformers

    from scalerl_trainer.utilization import peak_tflops

    device = open_device(options)
    versions: dict[str, str | None] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for module in ("deepspeed", "vllm", "flash_attn"):
        found = importlib.util.find_spec(module)
        versions[module] = "installed" if found else None
    size = 256 if options.tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: left @ right, device, 10)
    result: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": versions,
        "matmul_tflops": 2 * size**3 / seconds / 1e12,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        result |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "devices": torch.cuda.device_count(),
            "peak_tflops": peak_tflops(properties.name),
            "bfloat16": torch.cuda.is_bf16_supported(),
        }
    return result


def check_positions(options: Options) -> dict[str, Any]:
    import torch
    from support.gpu_models import make, policy_logprobs, positions_shape

    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.precision import buffer_dtypes, cast_parameters, check_buffer_dtypes

    device = open_device(options)
    result: dict[str, Any] = {"tolerance": TOLERANCE}
    for kind in ("qwen2", "llama3", "gemma3"):
        shape = positions_shape(kind, options.tiny)
        model = make(shape, device, torch.bfloat16).eval()
        ids = torch.randint(3, shape.vocabulary, (shape.sequence,)).tolist()
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device)).logits[0, :-1].float()
        target = torch.tensor(ids[1:], device=device)[:, None]
        expected = logits.log_softmax(-1).gather(1, target)[:, 0]
        buffers = buffer_dtypes(model)
        cast_parameters(model, torch.bfloat16)
        for fp32 in (False, True):
            policy = Policy(model, fp32_head=fp32).eval()
            difference = (policy_logprobs(policy, ids, device) - expected).abs()
            edges = [edge for edge in POSITIONS if edge < shape.sequence] + [shape.sequence]
            result[f"{kind} {'float32' if fp32 else 'bfloat16'} head"] = {
                f"{low}-{high}": float(difference[low:high].mean()) for low, high in pairwise(edges)
            }
        check_buffer_dtypes(model, buffers)
    worst = max(max(v.values()) for k, v in result.items() if k.endswith("bfloat16 head"))
    if not worst < TOLERANCE:
        raise AssertionError(f"log-probabilities differ by {worst:.3g} nats: {json.dumps(result)}")
    return result


def check_head(options: Options) -> dict[str, Any]:
    """Of a plain head, and of one with all that a family's may have: a bias, a scale and a cap of logits, a temperature."""
    import torch
    from support.gpu_models import SHAPES, TINY

    from scalerl_trainer.models.head import kernels_failure
    from scalerl_trainer.models.logits import PLAIN, LogitTransform

    device = open_device(options)
    shape = (TINY if options.tiny else SHAPES)["0.5B"]
    count = shape.sequence * shape.rows
    hidden = torch.randn(count, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(shape.vocabulary, (count,), device=device)
    # Weights of single tokens of both signs.
    weights = torch.randn(count, device=device)
    result: dict[str, Any] = {"tokens": count, "vocabulary": shape.vocabulary, "hidden": shape.hidden}
    result["kernels"] = kernels_failure(device) or "used"
    transformed = LogitTransform(scale=0.5, cap=4.0)
    for bias, transform, temperature in ((False, PLAIN, 1.0), (True, transformed, 0.7)):
        linear = torch.nn.Linear(
            shape.hidden, shape.vocabulary, bias=bias, device=device, dtype=torch.bfloat16
        )
        for parameter in linear.parameters():
            torch.nn.init.normal_(parameter, std=0.05 if parameter is linear.weight else 2.0)
        found = _compare_heads(linear, hidden, target, weights, transform, temperature, timed=not bias)
        result |= {"bias, cap, temperature": found} if bias else found
        _judge_heads(found, "bias, cap and temperature" if bias else "no bias, cap or temperature")
    return result


def _compare_heads(
    linear: Any,
    hidden: Any,
    target: Any,
    weights: Any,
    transform: Any,
    temperature: float,
    *,
    timed: bool,
) -> dict[str, dict[str, float]]:
    """Errors of the heads on some tokens against float64, and where ``timed``, seconds and bytes on all."""
    import torch

    from scalerl_trainer.models import head as head_module
    from scalerl_trainer.models.head import LogprobHead

    some, leaves = slice(0, min(len(target), 256)), [hidden, *linear.parameters()]
    exact = _exact_head(
        [hidden.detach()[some], *linear.parameters()], target[some], weights[some], transform, temperature
    )
    own, trial, result = head_module._operand, head_module.kernels_failure, dict[str, dict[str, float]]()
    for name, fp32 in (
        ("bfloat16", False),
        ("float32", True),
        ("float32 without kernels", True),
        ("cast to float32", True),
    ):
        cast, without = name.startswith("cast"), name.endswith("without kernels")
        head_module._operand = (lambda weight, fp32: weight.float()) if cast else own
        head_module.kernels_failure = (lambda device: "without") if without else trial
        # 101 rows a chunk: the last one is partial, and no later one's outputs are aligned.
        by_rows = 101 * 4 * linear.out_features
        head = LogprobHead(linear, fp32=fp32, chunk_bytes=by_rows, transform=transform)

        def work(head: LogprobHead = head, rows: slice = slice(None)) -> torch.Tensor:
            for leaf in leaves:
                leaf.grad = None
            logprobs, _ = head(hidden[rows], target[rows], temperature, True)
            (logprobs * weights[rows]).sum().backward()
            return logprobs

        logprobs = work(rows=some).detach()
        found = [hidden.grad[some], *(leaf.grad for leaf in leaves[1:])]
        names = ("hidden_gradient_error", "weight_gradient_error", "bias_gradient_error")
        result[name] = {"mean_error": float((logprobs - exact[0]).abs().mean())}
        for what, mine, other in zip(names, found, exact[1:], strict=False):
            result[name][what] = float((mine.double() - other).norm() / other.norm())
        head.chunk_bytes = None
        if timed:
            result[name]["seconds"] = seconds_of(work, hidden.device, 3)
            if hidden.device.type == "cuda":
                result[name]["peak_bytes"] = peak_bytes(hidden.device)
                torch.cuda.reset_peak_memory_stats(hidden.device)
    head_module._operand, head_module.kernels_failure = own, trial
    return result


def _judge_heads(result: dict[str, dict[str, float]], kind: str) -> None:
    cast_to = result["cast to float32"]
    for name in ("float32", "float32 without kernels"):
        found = result[name]
        if not found["mean_error"] <= min(TOLERANCE, result["bfloat16"]["mean_error"]):
            raise AssertionError(
                f"{kind}: the {name} head is further off than {TOLERANCE} nats or the bfloat16 one: {json.dumps(result)}"
            )
        for what in found:
            limit = min(GRADIENT_TOLERANCE, 1.2 * cast_to[what])
            if what.endswith("gradient_error") and not found[what] <= limit:
                raise AssertionError(
                    f"{kind}: {name}: {what} is more than {GRADIENT_TOLERANCE} or 1.2 times that of operands in float32: "
                    f"{json.dumps(result)}"
                )


def _exact_head(parts: list[Any], target: Any, weights: Any, transform: Any, temperature: float) -> list[Any]:
    """Log-probabilities and the gradients of their weighted sum by hidden states, weight and bias, in float64."""
    import torch

    leaves = [x.detach().double().requires_grad_() for x in parts]
    logits = leaves[0] @ leaves[1].t()
    if len(leaves) > 2:
        logits = logits + leaves[2]
    logits = logits * transform.scale
    if transform.cap is not None:
        logits = transform.cap * (logits / transform.cap).tanh()
    logprobs = (logits / temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]
    return [logprobs.detach(), *torch.autograd.grad((logprobs * weights).sum(), leaves)]


def check_step(options: Options, name: str) -> dict[str, Any]:
    """Rows are halved until a step fits into memory."""
    import torch
    from support.gpu_models import SHAPES, TINY, make, step_flops

    from scalerl_trainer.utilization import peak_tflops

    device = open_device(options)
    shape = (TINY if options.tiny else SHAPES)[name]
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    result: dict[str, Any] = {"sequence": shape.sequence}
    for way in ("trainer", "trainer, bfloat16 head", "trainer, sdpa", "plain transformers"):
        model = step = None
        rows = shape.rows
        while rows:
            try:
                model = make(shape, device, torch.bfloat16)
                parameters = sum(p.numel() for p in model.parameters())
                ids = torch.randint(3, shape.vocabulary, (rows, shape.sequence), device=device)
                step = stepper(way, model, ids, device)
                step()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                seconds = seconds_of(step, device, 2 if options.tiny else 4)
            except torch.OutOfMemoryError:
                rows //= 2
                model = step = None
                torch.cuda.empty_cache()
                continue
            tokens = rows * shape.sequence
            speed = step_flops(shape, parameters, tokens) / seconds / 1e12
            result["parameters"] = parameters
            result[way] = {
                "rows": rows,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "tflops": speed,
                "share_of_peak": speed / peak if peak else None,
                "peak_bytes": peak_bytes(device),
            }
            break
        else:
            result[way] = {"rows": 0, "reason": "not even one row fits into memory"}
        model = step = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
    first, second = result["trainer"], result["trainer, bfloat16 head"]
    if first["rows"] and first["rows"] == second["rows"]:
        result["share_of_step_for_float32_in_head"] = 1 - second["seconds"] / first["seconds"]
    return result


def stepper(way: str, model: Any, ids: Any, device: Any) -> Callable[[], object]:
    """A whole update: forward, backward, AdamW."""
    import torch
    from support.gpu_models import Masters

    from scalerl_trainer.algo.losses import Cispo, TokenBatch
    from scalerl_trainer.models import varlen
    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.precision import cast_parameters
    from scalerl_trainer.packing import Sequence, pack

    if way == "plain transformers":
        model.train()
        optimizer = Masters(list(model.parameters()))

        def plain() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

        return plain
    cast_parameters(model, torch.bfloat16)
    if way != "trainer, sdpa" and varlen.problem(model, torch.bfloat16, device) is None:
        varlen.use(model.config)
    policy = Policy(model, fp32_head=way != "trainer, bfloat16 head").train()
    masters = Masters(list(policy.parameters()))
    rows, length = ids.shape
    sequences = [Sequence(row[:16], row[16:]) for row in ids.tolist()]
    micro_batches = pack(sequences, rows * length, shared_rows=policy.variable_length).micro_batches
    loss = Cispo()

    def train() -> None:
        for micro in micro_batches:
            inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
            layout: tuple[Any, ...] = ()
            if policy.variable_length:
                layout = (None, None, varlen.boundaries(micro.position_ids_bt, device))
            sequence_m = micro.sequence_m.to(device)
            logprobs, _ = policy(*(t.to(device, non_blocking=True) for t in inputs), 1.0, True, *layout)
            ones = torch.ones_like(logprobs)
            batch = TokenBatch(logprobs, logprobs.detach(), ones, ones / (rows * length), sequence_m)
            loss(batch).loss.backward()
        masters.step()

    return train


def check_group(options: Options, world: int) -> dict[str, Any]:
    """The trainer's end is the trainer's own code; the other one opens what a generator opens."""
    open_device(options)
    if options.device == "cuda":
        # Before the group opens: NCCL with two processes on one device raises in some versions and hangs in others.
        need_devices(world, "NCCL takes no two processes on one device")
    result = group_of(world, options)
    if result["status"] != "ok":
        raise AssertionError(result["reason"])
    return result


def group_of(world: int, options: Options) -> dict[str, Any]:
    import torch

    from scalerl_trainer.publish.buckets import checksum_u8
    from scalerl_trainer.publish.sender_group import Store, open_group

    device = open_device(options)
    backend: Any = "nccl" if options.device == "cuda" else "gloo"
    store = Store("127.0.0.1", 60.0)
    receiver = None
    if world == 2:
        arguments = ["--receive", str(store.address.port), "--device", options.device]
        arguments += ["--tiny"] if options.tiny else []
        receiver = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    buffer = torch.randint(0, 255, (1 << (16 if options.tiny else 26),), dtype=torch.uint8, device=device)
    begin = time.monotonic()
    try:
        group = open_group(1, backend, world, store, device, 60.0, lambda: None)
        opened = time.monotonic() - begin
        begin = clock(device)
        group.wait(group.start_broadcast(buffer, 60.0), time.monotonic() + 60, lambda: None)
        seconds = clock(device) - begin
        if receiver is not None:
            said = receiver.communicate(timeout=60)[0]
            if f"checksum {checksum_u8(buffer)}" not in said:
                raise RuntimeError(f"the receiver said: {said[-300:]}")
        group.close()
        return {"status": "ok", "open_seconds": opened, "bytes": buffer.numel(), "seconds": seconds}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    finally:
        store.close()
        if receiver is not None:
            receiver.kill()
            receiver.wait()


def receive(port: int, options: Options) -> None:
    """The other end of ``group_of(2)``, as ``scalerl_generator.weights.receiver_group`` opens it."""
    from datetime import timedelta

    import torch
    import torch.distributed

    from scalerl_trainer.publish.buckets import checksum_u8

    c10d: Any = torch.distributed
    count = torch.cuda.device_count() if options.device == "cuda" else 0
    device = torch.device("cuda", min(1, count - 1)) if count else torch.device("cpu")
    limit = timedelta(seconds=60)
    client = c10d.TCPStore("127.0.0.1", port, is_master=False, timeout=limit, wait_for_workers=False)
    store = c10d.PrefixStore("scalerl-1", client)
    if count:
        nccl = c10d.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        group = c10d.ProcessGroupNCCL(store, 1, 2, nccl)
    else:
        gloo = c10d.ProcessGroupGloo._Options()
        gloo._timeout = limit
        gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = c10d.ProcessGroupGloo(store, 1, 2, gloo)
    ones = torch.ones(1, device=device)
    group.allreduce([ones]).wait()
    if count:
        group.broadcast([ones]).wait()
    buffer = torch.empty(1 << (16 if options.tiny else 26), dtype=torch.uint8, device=device)
    broadcast = c10d.BroadcastOptions()
    broadcast.rootRank = broadcast.rootTensor = 0
    group.broadcast([buffer], broadcast).wait()
    clock(device)
    print(f"checksum {checksum_u8(buffer)}", flush=True)


def check_publish(options: Options) -> dict[str, Any]:
    require("vllm", "deepspeed", "aiohttp")
    import tempfile

    from support.vllm_process import use_source_tree

    with tempfile.TemporaryDirectory() as folder:
        use_source_tree(Path(folder))
        return last_json([sys.executable, str(HERE / "publish.py"), "--quick"])


def check_run(options: Options) -> dict[str, Any]:
    """The tiny example's first steps after a short warm start."""
    require("vllm", "deepspeed", "aiohttp")
    import tempfile

    import yaml
    from support.measured_run import measured_run

    example = HERE.parent / "examples" / "tiny"
    manifest = yaml.safe_load((example / "run.yaml").read_text())
    spec = manifest["spec"]
    # A relative path starts at the folder of the run file, which is another one here.
    spec["task"]["jsonl"]["path"] = str(example / spec["task"]["jsonl"]["path"])
    spec["warmStart"] = {"steps": 50, "batchSize": 64, "learningRate": "1e-3"}
    spec["budget"] = {"maxSteps": 4}
    if options.device == "cuda":
        need_devices(2, "trainer and generator need a GPU each")
        for role in ("trainer", "generator"):
            spec[role] = {**spec.get(role, {}), "replicas": 1, "devices": 1}
            for only_on_cpu in ("cpuThreads", "kvCache"):
                spec[role].pop(only_on_cpu, None)
    with tempfile.TemporaryDirectory() as folder:
        summary, rows = measured_run(manifest, Path(folder) / "work", seconds=220)
    return {"steps": len(rows), "summary": summary}


def supported(module: str, name: str, *arguments: Any) -> Callable[[Options], dict[str, Any]]:
    """A check of ``support``, which needs the trainer to import."""

    def check(options: Options) -> dict[str, Any]:
        found: dict[str, Any] = getattr(importlib.import_module(f"support.{module}"), name)(
            options, *arguments
        )
        return found

    return check


CHECKS: dict[str, tuple[Callable[[Options], dict[str, Any]], float]] = {
    "machine": (check_machine, 60.0),
    "attention": (supported("gpu_attention", "check_attention"), 90.0),
    "head": (check_head, 90.0),
    "positions": (check_positions, 90.0),
    "engine-FSDP2": (supported("gpu_engine", "check_engine", "FSDP2"), 90.0),
    "engine-ZeRO1": (supported("gpu_engine", "check_engine", "ZeRO 1"), 90.0),
    "engine-ZeRO3": (supported("gpu_engine", "check_engine", "ZeRO 3"), 90.0),
    "offload": (supported("gpu_engine", "check_engine", "FSDP2", "OptimizerAndParameters"), 90.0),
    "offload-ZeRO": (supported("gpu_engine", "check_engine", "ZeRO 3", "Optimizer"), 90.0),
    "step-0.5B": (lambda options: check_step(options, "0.5B"), 90.0),
    "step-1.5B": (lambda options: check_step(options, "1.5B"), 90.0),
    "step-8B": (lambda options: check_step(options, "8B"), 90.0),
    "files": (supported("gpu_engine", "check_files"), 90.0),
    "lora": (supported("gpu_engine", "check_lora"), 90.0),
    "moe": (supported("gpu_engine", "check_moe"), 90.0),
    "memory": (supported("gpu_engine", "check_memory"), 90.0),
    "group-1": (lambda options: check_group(options, 1), 90.0),
    "group-2": (lambda options: check_group(options, 2), 90.0),
    "vllm": (supported("gpu_vllm", "check_vllm"), 150.0),
    "publish": (check_publish, 240.0),
    "run": (check_run, 240.0),
}
"""In the order they run, with the seconds that each may take."""


def last_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}: {done.stdout[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


# --- all of them -----------------------------------------------------------------------------------------


def child(name: str, options: Options, answer: Any) -> None:
    """One check, in a process and a process group of its own."""
    os.setpgrp()
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        result = {"status": "ok"} | CHECKS[name][0](options)
    except CannotRun as reason:
        result = {"status": "not run", "reason": str(reason)}
    except ImportError as error:
        result = {"status": "not run", "reason": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        lines = traceback.format_exc().splitlines()[-6:]
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:2000], "trace": lines}
    answer.send(result)
    answer.close()
    sys.stdout.flush()
    # Threads that are stuck in a collective would hold up an ordinary exit.
    os._exit(0)


def run_check(context: Any, name: str, options: Options, seconds: float) -> dict[str, Any]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, options, theirs))
    begin = time.monotonic()
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            result: dict[str, Any] = ours.recv()
        else:
            result = {"status": "failed", "reason": f"did not end within {seconds:.0f} s"}
    except EOFError:
        process.join(10)
        result = {"status": "failed", "reason": f"the process ended with {process.exitcode}"}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)  # whatever the check has started
    process.join(10)
    return result | {"check_seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether it runs, not how fast")
    parser.add_argument("--only", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--list", action="store_true", help="the checks' names")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options = Options(arguments.device, arguments.tiny)
    if arguments.receive is not None:
        receive(arguments.receive, options)
        return 0
    if arguments.list:
        print("\n".join(CHECKS))
        return 0
    names = arguments.only.split(",") if arguments.only else list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    # No process but the checks' own ever touches the device: what it holds is gone when the check is.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers"])
    begin = time.monotonic()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    results: dict[str, Any] = {}
    out: Path | None = None
    for name in names:
        left = TOTAL_SECONDS - (time.monotonic() - begin)
        if left < 5:
            results[name] = {"status": "not run", "reason": "the ten minutes are over"}
        else:
            limit = CHECKS[name][1] * (2 if options.device == "cpu" else 1)
            results[name] = run_check(context, name, options, min(limit, left))
        show(name, results[name])
        report = {
            "device": results.get("machine", {}).get("name", options.device),
            "tiny": options.tiny,
            "commit": commit(),
            "at": started,
            "seconds": round(time.monotonic() - begin, 1),
            "left": names[len(results) :],
            "checks": results,
        }
        before, out = out, arguments.out or result_file(str(report["device"]), started)
        write(report, out)
        if (
            before is not None and before != out
        ):  # named before the check `machine` has given the device's name
            before.unlink()
    print(f"written to {out}")
    return 1 if any(result["status"] == "failed" for result in results.values()) else 0


def result_file(device: str, started: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return HERE / "results" / f"gpu-check-{slug}-{started[:10]}.json"


def write(report: dict[str, Any], out: Path) -> None:
    """Replace ``out`` atomically: a run that is cut off leaves what its checks have measured so far."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.new")
    aside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    aside.replace(out)


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name:10} {result['status']:8} {result.get('check_seconds', 0):6.1f} s  {result.get('reason', '')}"
    )
    for key, value in result.items():
        if isinstance(value, dict):
            parts = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
            print(f"    {key}: {', '.join(parts)}")
        elif key not in ("status", "reason", "check_seconds"):
            print(f"    {key}: {value:.4g}" if isinstance(value, float) else f"    {key}: {value}")
    sys.stdout.flush()


def commit() -> str | None:
    """None where this is no repository, as in a copied working tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
