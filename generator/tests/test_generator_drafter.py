"""Drafts from past responses, siblings and other prompts; a memory that overwrites itself."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drafter_walk import walk
from numpy.typing import NDArray

from scalerl_generator.draft_threshold import DraftThreshold
from scalerl_generator.drafter import PAGE, Drafter

pytestmark = pytest.mark.timeout(300)  # the first test compiles

Int32s = NDArray[np.int32]


def tokens(seed: int, count: int, vocabulary: int = 5000) -> Int32s:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


class Running:
    """One completion that is drafted for, with a row of its own."""

    def __init__(self, drafter: Drafter, prompt: int, prompt_t: Int32s) -> None:
        self.drafter, self.row_t, self.length = drafter, np.zeros(4096, np.int32), len(prompt_t)
        self.row_t[: self.length] = prompt_t
        self.slot = drafter.begin(prompt, prompt_t)
        self.accepted = self.verified = 0

    def grow(self, *sampled: int, limit: int = 16, threshold: float = 0.2) -> list[int]:
        """Add what was sampled; the draft after it."""
        self.row_t[self.length : self.length + len(sampled)] = sampled
        self.length += len(sampled)
        one = np.zeros(1, np.int32)
        draft_sd, drafted_s, accepted, verified = self.drafter.propose(
            one + self.slot, one, self.row_t[None], one + self.length, one + limit, threshold
        )
        self.accepted += accepted
        self.verified += verified
        return draft_sd[self.slot, : drafted_s[self.slot]].tolist()

    def follow(self, response_t: Int32s, threshold: float = 0.2) -> int:
        """Sample a response; the number of steps."""
        at = steps = 0
        draft: list[int] = []
        while at < len(response_t):
            ahead = response_t[at : at + len(draft) + 1].tolist()
            right = next((i for i, token in enumerate(draft[: len(ahead)]) if token != ahead[i]), len(draft))
            sampled = ahead[: right + 1]
            draft = self.grow(*sampled, threshold=threshold)
            at += len(sampled)
            steps += 1
        return steps


def test_drafter_continues_a_past_response_of_the_prompt() -> None:
    drafter = Drafter(4, 10_000, 16)
    prompt_t, response_t = tokens(1, 50), tokens(2, 300)
    drafter.remember(0, prompt_t, response_t)
    running = Running(drafter, 0, prompt_t)
    assert running.grow(int(response_t[0])) == response_t[1:17].tolist()
    assert running.follow(response_t[1:]) < 300 / 12
    assert running.accepted > 270
    tried, accepted = drafter.by_position()
    assert sum(accepted) == running.accepted
    assert tried[0] >= tried[15] > 0


def test_drafter_begins_with_the_prompt_alone() -> None:
    """The context of a response's first token is the end of its prompt."""
    drafter = Drafter(4, 10_000, 8)
    prompt_t, response_t = tokens(1, 50), tokens(2, 40)
    drafter.remember(0, prompt_t, response_t)
    assert Running(drafter, 0, prompt_t).grow() == response_t[:8].tolist()


def test_drafter_prefers_responses_of_the_same_prompt() -> None:
    drafter = Drafter(4, 10_000, 4)
    shared = tokens(3, 20)
    ends = [tokens(10 + i, 10) for i in range(2)]
    prompts = [tokens(20 + i, 30) for i in range(2)]
    for i in range(2):
        drafter.remember(i, prompts[i], np.concatenate([shared, ends[i]]))
    for i in range(2):
        running = Running(drafter, i, prompts[i])
        assert running.grow(*shared.tolist()) == ends[i][:4].tolist()


def test_drafter_uses_what_other_prompts_said() -> None:
    drafter = Drafter(4, 10_000, 4)
    said = tokens(3, 40)
    drafter.remember(0, tokens(20, 30), said)
    assert Running(drafter, 1, tokens(21, 30)).grow(*said[:12].tolist()) == said[12:16].tolist()


def test_drafter_uses_siblings_that_run() -> None:
    drafter = Drafter(4, 10_000, 4)
    prompt_t, said = tokens(20, 30), tokens(3, 40)
    Running(drafter, 0, prompt_t).grow(*said.tolist())
    assert Running(drafter, 0, prompt_t).grow(*said[:6].tolist()) == said[6:10].tolist()


def test_drafter_follows_the_majority() -> None:
    drafter = Drafter(4, 10_000, 4)
    prompt_t, context = tokens(20, 30), tokens(3, 12)
    for end in (7, 8, 8, 7, 8):
        drafter.remember(0, prompt_t, np.array([*context, end], np.int32))
    assert Running(drafter, 0, prompt_t).grow(*context.tolist())[:1] == [8]


def test_drafter_stops_where_a_token_does_not_pay() -> None:
    drafter = Drafter(4, 10_000, 16)
    prompt_t, response_t = tokens(1, 50), tokens(2, 300)
    drafter.remember(0, prompt_t, response_t)
    running = Running(drafter, 0, prompt_t)
    lengths = [len(running.grow(int(response_t[i]), threshold=t)) for i, t in enumerate((0.1, 0.7, 0.9, 1.0))]
    assert lengths[0] == 16
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[3] == 0
    assert len(running.grow(int(response_t[4]), limit=3)) == 3


def test_drafter_learns_what_is_not_accepted() -> None:
    """Past responses that the weights no longer sample are drafted for a while, and then not."""
    drafter = Drafter(4, 100_000, 8)
    prompt_t, old_t = tokens(1, 50), tokens(2, 2000, vocabulary=8)
    drafter.remember(0, prompt_t, old_t)
    verified = []
    for i in range(8):
        running = Running(drafter, 0, prompt_t)
        running.follow(tokens(100 + i, 300, vocabulary=8), threshold=0.5)
        verified.append(running.verified)
        drafter.end(running.slot)
    assert verified[-1] < verified[0] / 2


def test_drafter_forgets_the_oldest() -> None:
    drafter = Drafter(1, 20 * PAGE, 8)
    prompt_t = tokens(0, 12)
    responses = [tokens(i, 5 * PAGE) for i in range(1, 7)]
    for response_t in responses:
        drafter.remember(0, prompt_t, response_t)

    def drafted(response_t: Int32s) -> bool:
        running = Running(drafter, 0, prompt_t)
        draft = running.grow(*response_t[100:112].tolist())
        drafter.end(running.slot)
        return draft == response_t[112:120].tolist()

    assert [drafted(response_t) for response_t in responses] == [False, False, False, False, True, True]


def test_drafter_slots_are_given_back() -> None:
    drafter = Drafter(2, 1000, 4)
    first, _ = (Running(drafter, 0, tokens(0, 5)) for _ in range(2))
    with pytest.raises(IndexError):
        drafter.begin(0, tokens(0, 5))
    drafter.end(first.slot)
    assert drafter.begin(0, tokens(0, 5)) == first.slot


@pytest.mark.parametrize("seed", range(8))
def test_drafter_random_walk(seed: int) -> None:
    walk(seed, 300)


def test_drafter_stays_within_its_arrays(tmp_path: Path) -> None:
    """The random walk, compiled with checked indices: otherwise it would read and write elsewhere."""
    environ = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "from drafter_walk import walk\nfor seed in range(20): walk(seed, 300)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr


def observed(step: tuple[float, float, float], rows: int, acceptance: float) -> DraftThreshold:
    """After steps of ``a + b rows + c drafted`` seconds, with noise, and drafts where the threshold allows tokens as likely as these."""
    random = np.random.default_rng(0)
    threshold = DraftThreshold()
    for _ in range(400):
        value = threshold.value(rows)
        drafted = int(rows * random.uniform(2, 6)) if value <= max(acceptance, 0.5) else 0
        a, b, c = step
        seconds = (a + b * rows + c * drafted) * random.uniform(0.9, 1.2)
        threshold.observe(
            seconds=seconds, rows=rows, drafted=drafted, sampled=rows + int(acceptance * drafted)
        )
    return threshold


def test_threshold_is_low_where_steps_wait_for_memory() -> None:
    assert observed((0.02, 0.00001, 0.00001), rows=8, acceptance=0.5).value(8) < 0.1


def test_threshold_ends_drafts_where_a_drafted_token_costs_as_much_as_a_row() -> None:
    threshold = observed((0.0001, 0.001, 0.001), rows=256, acceptance=0.3)
    values = [threshold.value(256) for _ in range(64)]
    assert sum(value < 0.8 for value in values) <= 2, "but for probes, nothing is drafted"


def test_threshold_ignores_steps_that_waited() -> None:
    threshold = observed((0.02, 0.00001, 0.00001), rows=8, acceptance=0.5)
    before = threshold.value(8)
    for _ in range(5):
        threshold.observe(seconds=30.0, rows=8, drafted=30, sampled=20)
    assert threshold.value(8) == before


def test_threshold_follows_a_batch_that_became_slow() -> None:
    threshold = observed((0.001, 0.00001, 0.00001), rows=8, acceptance=0.5)
    for drafted in [30, 0, 16] * 30:
        threshold.observe(seconds=0.001 + 0.1 * drafted, rows=8, drafted=drafted, sampled=8 + drafted // 2)
    assert threshold.value(8) > 0.9
