"""The process group of weight updates, of one process and of two, for ``gpu_check``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.gpu_device import Options, clock, need_devices, open_device

SCRIPT = Path(__file__).parents[1] / "gpu_check.py"


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

    from scalerl_api.weight_layout import tensor_checksum
    from scalerl_trainer.publish.sender_group import Store, open_group

    device = open_device(options)
    backend: Any = "nccl" if options.device == "cuda" else "gloo"
    store = Store("127.0.0.1", 60.0)
    receiver = None
    if world == 2:
        arguments = ["--receive", str(store.port), "--device", options.device]
        arguments += ["--tiny"] if options.tiny else []
        receiver = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    buffer = torch.randint(0, 255, (1 << (16 if options.tiny else 26),), dtype=torch.uint8, device=device)
    begin = time.monotonic()
    try:
        group = open_group(store.join(1, backend, world, 60.0), store, device, lambda: None)
        opened = time.monotonic() - begin
        begin = clock(device)
        group.wait(group.start_broadcast(buffer, 60.0), time.monotonic() + 60, lambda: None)
        seconds = clock(device) - begin
        if receiver is not None:
            said = receiver.communicate(timeout=60)[0]
            if f"checksum {tensor_checksum(torch, buffer)}" not in said:
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

    from scalerl_api.weight_layout import tensor_checksum

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
    print(f"checksum {tensor_checksum(torch, buffer)}", flush=True)
