"""Time to write the record of rollouts, and to find rollouts in it.

Writes rollouts of 512 tokens (2,048 characters of English words) in groups of 16 by the coordinator's code, then searches them as
``scalerl rollouts`` does. Half of the rewards are 1; the text occurs in one of 10,000 completions.

    python benchmarks/rollouts.py [--rollouts N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from coordinator import english

from scalerl_analysis import find_rollouts
from scalerl_api.wire import GroupText, PromptRef, Split, TrainedSequence, VersionSpan
from scalerl_cli.main import parser as command_line
from scalerl_cli.rollouts import conditions as conditions_of
from scalerl_cli.rollouts import prepare_search
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.journal_records import StoredCompletion, StoredGroup
from scalerl_coordinator.recorded_rows import RecordedGroup
from scalerl_coordinator.rollout_record import RolloutRecord

GROUPS, COMPLETIONS, TOKENS = 32, 16, 512
TEXTS = english(4096, TOKENS * 4)
LENGTHS = np.full(TOKENS, 4, "<u2").tobytes()
DIFFERENCES = np.random.default_rng(0).normal(0, 0.05, (256, TOKENS)).astype("<f2")
NEEDLE = "I cannot help"


def groups_of(step: int, source: random.Random) -> list[RecordedGroup]:
    """The groups of a step, each completion with a text of its own."""
    accepted = Accepted(
        lease_id="a",
        prompt_tokens=16,
        lengths=[TOKENS] * COMPLETIONS,
        scores=[float(at % 2) for at in range(COMPLETIONS)],
        truncated=0,
        oldest_version=step,
        version_tokens=0,
    )
    completion = StoredCompletion(
        token_ids=bytes(4 * TOKENS), logprobs=b"", versions=[VersionSpan(step, 0)], finish_reason="stop"
    )
    groups = []
    for number in range(GROUPS):
        texts = []
        for _ in range(COMPLETIONS):
            text, cut = source.choice(TEXTS), source.randrange(TOKENS * 4)
            texts.append((NEEDLE if source.random() < 1e-4 else "") + text[cut:] + text[:cut])
        text = GroupText(
            prompt=f"Question {number}",
            reference="4",
            labels={"hard": "no"},
            completions=texts,
            token_characters=[LENGTHS] * COMPLETIONS,
        )
        stored = StoredGroup(
            prompt_token_ids=b"", completions=[completion] * COMPLETIONS, prompt_id=f"p{number}", text=text
        )
        slot, prompt = step * GROUPS + number, PromptRef(0, Split.TRAIN, number)
        groups.append(RecordedGroup.of_training(step, slot, prompt, accepted, stored, skipped=False))
    return groups


def write(directory: Path, rollouts: int) -> dict[str, float]:
    """Write the record; returns figures. Making the texts is not part of them."""
    lost: list[int] = []
    record = RolloutRecord(directory, 2**50, lambda prompt: "main", lost.append)
    record.start()
    seconds = cpu = longest = 0.0
    source = random.Random(0)
    for step in range(-(-rollouts // (GROUPS * COMPLETIONS))):
        groups = groups_of(step, source)
        sequences = [
            TrainedSequence(g.slot, at, 0.5, 0.01, 0.2, DIFFERENCES[source.randrange(256)].tobytes())
            for g in groups
            for at in range(COMPLETIONS)
        ]
        started, used = time.perf_counter(), time.process_time()
        record.add_step(step, groups, sequences, step)
        longest = max(longest, time.perf_counter() - started)
        record.drain()
        seconds, cpu = seconds + time.perf_counter() - started, cpu + time.process_time() - used
    record.close()
    return {
        "rollouts_per_second_written": round(rollouts / seconds),
        "cpu_seconds_per_1000_rollouts": round(1000 * cpu / rollouts, 4),
        "longest_call_milliseconds": round(1000 * longest, 2),
        "lost_rollouts": sum(lost),
        "bytes_per_rollout": round(sum(path.stat().st_size for path in directory.iterdir()) / rollouts),
    }


def search(run: Path, *conditions: str) -> dict[str, float]:
    """Search three times; returns the best time and its CPU time."""
    arguments = command_line().parse_args(["rollouts", str(run), *conditions])
    prepare_search()
    times = []
    for _ in range(3):
        started, used = time.perf_counter(), time.process_time()
        matching = find_rollouts(
            arguments.dir, conditions_of(arguments), limit=arguments.limit or None
        ).matching
        times.append((time.perf_counter() - started, time.process_time() - used))
    return {
        "seconds": round(min(times)[0], 3),
        "cpu_seconds": round(min(cpu for _, cpu in times), 3),
        "found": matching,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument(
        "--directory", type=Path, help="where the record goes (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        run = Path(directory)
        figures: dict[str, object] = {"rollouts": arguments.rollouts, "cores": len(os.sched_getaffinity(0))}
        figures |= write(run / "rollouts", arguments.rollouts)
        figures["files"] = len(list((run / "rollouts").iterdir()))
        figures["reward_and_text"] = search(run, "--reward", "1", "--contains", NEEDLE)
        figures["text"] = search(run, "--contains", NEEDLE)
        figures["worst_of_last_step"] = search(run, "--step", "last", "--sort", "reward", "--limit", "5")
    print(json.dumps({"benchmark": "rollouts", "figures": figures}))


if __name__ == "__main__":
    main()
