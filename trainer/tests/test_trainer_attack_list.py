"""An attacker at the trainer's HTTP port, which has no secrets and accepts nothing."""

from __future__ import annotations

from attack_list import admitted

from scalerl_trainer.metrics import Metrics, StatusServer


async def test_trainer_serves_probes_only() -> None:
    server = StatusServer("127.0.0.1", 0, Metrics())
    try:
        assert await admitted(f"http://127.0.0.1:{server.port}", "token", of_server=()) == []
    finally:
        server.close()
