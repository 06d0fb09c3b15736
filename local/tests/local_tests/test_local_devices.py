from __future__ import annotations

from pathlib import Path

import pytest
from minimal_run import run_spec

from scalerl_lifecycle.role_containers import plan
from scalerl_local.devices import NotEnoughDevices, check, machine_devices
from scalerl_local.ports import Ports

LISTING = """#!/bin/sh
echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'
echo '  MIG 1g.18gb     Device  0: (UUID: MIG-1)'
echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", ()),
        ("0", ("0",)),
        ("3, 1", ("3", "1")),
        ("GPU-1,GPU-2", ("GPU-1", "GPU-2")),
        ("0,-1,1", ("0",)),
        ("-1", ()),
    ],
)
def test_machine_devices_of_the_environment(visible: str, expected: tuple[str, ...]) -> None:
    assert machine_devices({"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize(
    ("tool", "expected"), [(LISTING, ("0", "1")), ("#!/bin/sh\necho no driver\nexit 9\n", ()), (None, ())]
)
def test_machine_devices_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str | None, expected: tuple[str, ...]
) -> None:
    if tool is not None:
        (tmp_path / "nvidia-smi").write_text(tool)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_devices({}) == expected


def test_trainer_devices_are_readable_by_deepspeed() -> None:
    check(plan(run_spec(generator={"devices": 1}, trainer={"devices": 0})), ("GPU-1",))
    with pytest.raises(NotEnoughDevices, match="names GPU-1, but the trainer's DeepSpeed reads only numbers"):
        check(plan(run_spec(generator={"devices": 1}, trainer={"devices": 1})), ("GPU-1", "GPU-2"))


def test_ports_are_reserved_for_their_server() -> None:
    import socket

    ports = Ports()
    taken = [ports.take() for _ in range(50)]
    assert len(set(taken)) == 50
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", taken[0]))
    with socket.create_server(("127.0.0.1", taken[0])), pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", taken[0]))
    with socket.create_server(("127.0.0.1", taken[0])):
        pass  # a server that comes back finds its port
    ports.close()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", taken[1]))
