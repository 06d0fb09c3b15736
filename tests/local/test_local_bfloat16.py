"""The bfloat16 example as it is: trainer and generator agree as well at position 1,900 as at position 10."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from runs import ROOT, assert_counts_add_up, assert_nothing_left, start_run

EXAMPLE = ROOT / "examples/tiny-bfloat16/run.yaml"
BUCKETS = ("0_256", "256_1k", "1k_4k")
TIMES_THE_FIRST = 2.0
MIN_TOKENS = 2000
"""Of a bucket, so that its mean is no matter of luck."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]


def test_bfloat16_mismatch_does_not_grow_with_position(tmp_path: Path) -> None:
    """With the trainer's rotary tables rounded to bfloat16 it is 1.9e-4 in the first bucket and 1.8e-3 in the last."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["spec"]["task"]["jsonl"]["path"] = str(EXAMPLE.with_name("data.jsonl"))
    with start_run(tmp_path, spec) as run:
        code = run.finish(2300)
        summary = run.summary()
        measured = summary["mismatch_by_position"]["sampled"]
        tokens = {b: sum(row.get(f"sampled_tokens_{b}", 0.0) for row in run.metrics()) for b in BUCKETS}
        print(f"{summary['wall_seconds']:.0f} s, reward {summary['first_reward']:.2f} to", end=" ")
        print(f"{summary['last_reward']:.2f}, sampled mismatch {measured} of {tokens} tokens")
        assert code == 0, run.tail()
    assert_nothing_left(run.directory)
    assert_counts_add_up(summary, spec)
    assert measured.keys() == set(BUCKETS)
    assert min(tokens.values()) >= MIN_TOKENS, tokens
    assert measured[BUCKETS[-1]] <= TIMES_THE_FIRST * measured[BUCKETS[0]], measured
    assert summary["last_reward"] > 0
