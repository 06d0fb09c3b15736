"""A training step beside plain transformers, for ``gpu_check``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.gpu_device import Options, open_device, peak_bytes, seconds_of


def check_step(options: Options, name: str) -> dict[str, Any]:
    """Rows are halved until a step fits into memory."""
    import torch

    from scalerl_trainer.utilization import peak_tflops
    from support.gpu_models import SHAPES, TINY, make, step_flops

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

    from scalerl_trainer.algo.losses import Cispo, TokenBatch
    from scalerl_trainer.models import varlen
    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.precision import cast_parameters
    from scalerl_trainer.packing import Sequence, pack
    from support.gpu_models import Masters

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
