"""``benchmarks/gpu_check.py`` at tiny shapes, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
# Appended: `benchmarks` has an operator.py, which must not come before the standard library's.
sys.path.append(str(SCRIPT.parent))

from support import gpu_device, gpu_group, gpu_head  # noqa: E402

ENGINE = ("engine-FSDP2", "engine-ZeRO1", "engine-ZeRO3")
CHECKS = (
    *("machine", "attention", "head", "positions", *ENGINE, "offload", "offload-ZeRO"),
    *("step-0.5B", "step-8B", "files", "lora", "moe", "memory", "group-1", "group-2"),
)


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=350,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "checks",
    [("machine", "attention", "head", "files"), pytest.param(CHECKS, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_gpu_check_runs_on_cpu(checks: tuple[str, ...], tmp_path: Path) -> None:
    done = check("--device", "cpu", "--tiny", "--only", ",".join(checks), "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["device"], report["tiny"]) == ("cpu", True)
    assert list(report["checks"]) == list(checks)
    assert {result["status"] for result in report["checks"].values()} == {"ok"}
    head = report["checks"]["head"]
    assert head["float32"]["mean_error"] < 1e-5
    assert head["float32 without kernels"]["mean_error"] < 1e-5
    assert head["kernels"] == "they need a CUDA device"
    assert head["bias, cap, temperature"]["float32"]["mean_error"] < 1e-5
    assert 0 < head["bias, cap, temperature"]["float32"]["bias_gradient_error"] < 0.01
    if checks != CHECKS:
        return
    step = report["checks"]["step-0.5B"]
    for way in ("trainer", "trainer, bfloat16 head", "trainer, sdpa", "plain transformers"):
        assert step[way]["tokens_per_second"] > 0
    assert report["checks"]["positions"]["llama3 bfloat16 head"]["0-256"] < 0.02


@pytest.mark.full
@pytest.mark.slow
def test_gpu_check_without_deepspeed_trains_with_fsdp2(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    out = tmp_path / "out.json"
    done = check(
        *("--device", "cpu", "--tiny", "--only", ",".join(ENGINE), "--out", str(out)),
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    fsdp2, *zero = json.loads(out.read_text())["checks"].values()
    assert fsdp2["status"] == "ok", fsdp2
    assert fsdp2["logprob_gain"] > 0
    assert [(check["status"], check["reason"]) for check in zero] == [
        ("not run", "deepspeed is not installed")
    ] * 2


@pytest.mark.slow
def test_gpu_check_without_gpu_gives_reasons(tmp_path: Path) -> None:
    """The same without DeepSpeed or vLLM; exit code 0."""
    done = check("--only", "head,group-1", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout[-3000:]
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    for result in checks.values():
        assert (result["status"], result["reason"]) == ("not run", "torch sees no CUDA device")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["bias", "cap", "temperature", "slope"])
def test_head_check_finds_what_the_head_leaves_out(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head with all of them. The cap's derivative shows in gradients alone."""
    import torch

    from scalerl_trainer.models import head
    from scalerl_trainer.models.logits import PLAIN

    logits, forward = head._logits, head.LogprobHead.forward
    if wrong == "bias":
        monkeypatch.setattr(head, "_logits", lambda s, m, bias, *rest: logits(s, m, None, *rest))
    elif wrong == "cap":
        monkeypatch.setattr(
            head, "_logits", lambda s, m, b, way: logits(s, m, b, replace(way, transform=PLAIN))
        )
    elif wrong == "temperature":
        monkeypatch.setattr(
            head.LogprobHead, "forward", lambda self, h, t, _, *rest: forward(self, h, t, 1.0, *rest)
        )
    else:
        monkeypatch.setattr(torch.Tensor, "square_", lambda self: self.zero_())
    with pytest.raises(AssertionError, match=r"^bias, cap and temperature: "):
        gpu_head.check_head(gpu_device.Options("cpu", tiny=True))


def test_gpu_check_writes_after_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invocation that is cut off in its second check keeps the first one's result."""
    module: dict[str, Any] = runpy.run_path(str(SCRIPT))
    out = tmp_path / "results" / "out.json"

    def run_check(_context: object, name: str, *_: object) -> dict[str, Any]:
        if name == "engine-FSDP2":
            raise KeyboardInterrupt
        return {"status": "ok", "name": "A device"}

    module["main"].__globals__["run_check"] = run_check
    arguments = ["gpu_check.py", "--only", "machine,engine-FSDP2,run", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(KeyboardInterrupt):
        module["main"]()
    report = json.loads(out.read_text())
    assert (report["device"], report["left"]) == ("A device", ["engine-FSDP2", "run"])
    assert report["checks"] == {"machine": {"status": "ok", "name": "A device"}}
    assert list(out.parent.iterdir()) == [out]


def test_gpu_check_that_time_runs_out_for_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are named have their own limits alone."""
    module: dict[str, Any] = runpy.run_path(str(SCRIPT))
    run_check, given = module["run_check"], dict[str, float]()

    def with_seconds(context: object, name: str, options: object, left: float) -> dict[str, Any]:
        given[name] = left
        return run_check(context, name, options, left) if left < math.inf else {"status": "ok"}

    clock = SimpleNamespace(monotonic=lambda: 0.0)  # a slow machine would have fewer seconds left
    module["main"].__globals__.update(TOTAL_SECONDS=4.4, run_check=with_seconds, time=clock)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(out)])
    assert module["main"]() == 0
    results = json.loads(out.read_text())["checks"]
    assert list(results) == list(module["CHECKS"])
    assert results["machine"] == {"status": "not run", "reason": "4 s left, it needs 60"}
    assert results["run"] == {"status": "not run", "reason": "4 s left, it needs 240"}
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", "vllm,run", "--out", str(out)])
    assert module["main"]() == 0
    assert given["vllm"] == given["run"] == math.inf


HANGING = """
import os, subprocess, sys, time
from multiprocessing import connection, get_context
from pathlib import Path

sys.path.append({benchmarks!r})
import gpu_check

PIDS = Path({folder!r})
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def hang(options):
    child = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time; print(subprocess.Popen({{SLEEP}}, start_new_session=True).pid, flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    grandchild = child.stdout.readline().decode().strip()
    (PIDS / "new").write_text(f"{{os.getpid()}} {{child.pid}} {{grandchild}}")
    (PIDS / "new").rename(PIDS / "pids")
    {end}


gpu_check.CHECKS["hang"] = (hang, 7.0)


def poll(self, seconds):
    print(seconds)
    while not (PIDS / "pids").exists():  # the time is over when the processes are there
        time.sleep(0.02)
    return {answers} and own_poll(self, 60)


if __name__ == "__main__":
    own_poll, connection.Connection.poll = connection.Connection.poll, poll
    print(gpu_check.run_check(get_context("forkserver"), "hang", gpu_check.Options("cpu", True), {left}))
"""


@pytest.mark.parametrize(
    ("end", "left", "found"),
    [
        ("time.sleep(600)", "1e9", "14.0\n{'status': 'failed', 'reason': 'did not end within 14 s'"),
        ("time.sleep(600)", "8.0", "8.0\n{'status': 'not run', 'reason': '8 s left, it needs 14'"),
        ("return {}", "1e9", "14.0\n{'status': 'ok'"),
    ],
    ids=["deadline", "time-over", "ends"],
)
def test_gpu_check_leaves_no_process_of_a_check(end: str, left: str, found: str, tmp_path: Path) -> None:
    """Of those with a session of their own too, whose parents end before."""
    answers = end.startswith("return")
    script = tmp_path / "hanging.py"
    folders = {"benchmarks": str(SCRIPT.parent), "folder": str(tmp_path)}
    script.write_text(HANGING.format(end=end, left=left, answers=answers, **folders))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=350)
    assert done.stdout.startswith(found), done
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_gpu_check_counts_devices_before_group_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    opened: list[int] = []
    monkeypatch.setattr(gpu_group, "group_of", lambda world, _: opened.append(world) or {"status": "ok"})
    options = gpu_device.Options("cuda", tiny=True)
    with pytest.raises(
        gpu_device.CannotRun, match=r"^2 GPUs are needed, this process sees 1: NCCL takes no two"
    ):
        gpu_group.check_group(options, 2)
    gpu_group.check_group(options, 1)
    assert opened == [1]


@pytest.mark.vllm
@pytest.mark.full
def test_gpu_check_vllm_on_cpu(tmp_path: Path) -> None:
    """Each version is what the server answers by, and one that returns gives the same answers to the last bit."""
    done = check("--device", "cpu", "--tiny", "--only", "vllm", "--out", str(tmp_path / "out.json"))
    (result,) = json.loads((tmp_path / "out.json").read_text())["checks"].values()
    assert result["status"] == "ok", done.stdout[-3000:]
    for version in ("version 1", "version 2", "version 5, of adapters"):
        assert 0 < result[f"{version}, scored"]["mean"] < 0.02
        assert 0 < result[f"{version}, sampled"]["mean"] < 0.02
    assert result["version 3, weights before"]["mean"] > 0.1
    assert result["version 4 beside version 1, equal"]["max"] == 0


@pytest.mark.slow
@pytest.mark.full
def test_gpu_check_run_on_cpu(tmp_path: Path) -> None:
    done = check("--device", "cpu", "--tiny", "--only", "run", "--out", str(tmp_path / "out.json"))
    (result,) = json.loads((tmp_path / "out.json").read_text())["checks"].values()
    assert (result["status"], result.get("steps")) == ("ok", 4), done.stdout[-3000:]


def test_gpu_check_names_missing_package() -> None:
    with pytest.raises(gpu_device.CannotRun, match=r"^no_such_package is not installed$"):
        gpu_device.require("json", "no_such_package")


def test_gpu_check_unknown_check_raises() -> None:
    done = check("--only", "heads")
    assert done.returncode == 2
    assert "no check is called heads; there are machine, attention, head," in done.stdout
