"""Two generators of two tensor-parallel workers each take every version, and sample what the trainer computes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from runs import START_SECONDS, assert_counts_add_up, assert_nothing_left, small_spec, start_run

EXACT = 1e-5
"""Greatest difference of log-probabilities in float32, in nats; that of one worker is about 5e-6."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("backend", ["Gloo", "Files"])
def test_generators_of_two_workers(backend: str, tmp_path: Path) -> None:
    """Until two updates were published to both: the second generator may be ready many steps after the first."""
    spec = small_spec(
        generator__replicas=2,
        generator__cpuWorkers=2,
        generator__kvCache="64Mi",
        trainer__replicas=1,
        weightSync={"backend": backend},
        checkpoint__everySteps=1000,
        budget__maxSteps=10_000,
    )
    with start_run(tmp_path, spec) as run:

        def both_were_updated_twice() -> bool:
            rows = run.metrics()
            return sum(row["applied"] and row.get("publish_members") == 2 for row in rows) >= 2

        run.until(both_were_updated_twice, 2 * START_SECONDS, "two updates were published to both generators")
        run.process.send_signal(signal.SIGINT)
        assert run.finish(120) == 130, run.tail()
        rows, summary = run.metrics(), run.summary()
    assert_nothing_left(run.directory)
    assert_counts_add_up(summary, spec, complete=False)
    assert not any(row.get("publish_failed_members") for row in rows)
    probes = [row["probe_max_difference"] for row in rows if "probe_max_difference" in row]
    assert len(probes) >= 2
    assert max(probes) <= EXACT
