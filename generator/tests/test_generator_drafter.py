"""Drafts from past responses, siblings and other prompts; a memory that overwrites itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drafter_walk import walk
from numpy.typing import NDArray

from scalerl_generator.drafts.compiled_drafts import PAGE
from scalerl_generator.drafts.draft_threshold import Control, DraftThreshold
from scalerl_generator.drafts.drafter import Drafter

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
        return list(map(int, draft_sd[self.slot, : drafted_s[self.slot]]))

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
    assert drafter.take_tally(running.slot).sum(1).tolist() == [running.verified, running.accepted]
    assert drafter.take_tally(running.slot).tolist() == [[0] * 16] * 2


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
        return draft == list(response_t[112:120])

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


@pytest.mark.timeout(900)
def test_drafter_stays_within_its_arrays(pytestconfig: pytest.Config) -> None:
    """The random walk, compiled with checked indices: otherwise it would read and write elsewhere."""
    # Kept from run to run, apart from what is compiled without checks: numba would take the one for the other.
    compiled = pytestconfig.rootpath / ".pytest_cache" / "numba-checked"
    environ = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(compiled)}
    code = "from drafter_walk import walk\nfor seed in range(20): walk(seed, 300)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environ,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


ACCEPTED = 0.9 ** np.arange(1, 17)
"""Probability of the tokens of a draft, each with those before it."""


def tokens_per_second(cost: tuple[float, float, float], rows: int, drafted: int) -> float:
    a, b, c = cost
    return float(rows * (1 + ACCEPTED[:drafted].sum()) / (a + b * rows + c * rows * drafted))


@pytest.mark.parametrize(
    ("rows", "cost"),
    [
        (8, (0.02, 1e-5, 1e-5)),  # a step waits for memory: long drafts, eight times the tokens
        (16, (0.01, 1e-4, 2e-4)),
        (64, (0.01, 1e-4, 2e-4)),
        (256, (0.02, 1e-4, 1e-4)),
        (256, (1e-4, 1e-3, 1e-3)),  # a drafted token costs as much as a row: none
        (256, (0.01, 1e-3, 1.2e-3)),
    ],
)
def test_threshold_reaches_the_best_speed(rows: int, cost: tuple[float, float, float]) -> None:
    """Seconds are noisy, one step in a hundred waits for something else, and the cost was ten times as high before."""
    random = np.random.default_rng(0)
    best = max(tokens_per_second(cost, rows, drafted) for drafted in range(17))
    threshold = DraftThreshold()
    spent = sampled = 0.0
    for step in range(1500):
        now = cost if step > 300 else (cost[0], cost[1], 10 * cost[2])
        longest = int((threshold.value(rows) <= ACCEPTED).sum())
        drafting = -(-rows // 8) if threshold.is_probe else rows
        drafted = drafting * longest
        accepted = int((random.random((drafting, 1)) < ACCEPTED[None, :longest]).sum())
        seconds = now[0] + now[1] * rows + now[2] * drafted
        noisy = seconds * random.lognormal(0, 0.15) * (30 if random.random() < 0.01 else 1)
        threshold.observe(seconds=noisy, rows=rows, drafted=drafted, sampled=rows + accepted)
        if step > 500:
            spent += seconds
            sampled += rows + drafting * ACCEPTED[:longest].sum()
    assert sampled / spent > 0.96 * best  # a control takes up to .016


def simulated_gain(
    *, accepted: float, rows_of: Callable[[int], int], steps: range, controlled: bool = True
) -> tuple[float, DraftThreshold]:
    """Tokens per second over ``steps``, in multiples of those without drafts.

    The drafter expects that 9 of 10 tokens follow one that is accepted, as before a change of the weights; ``accepted`` do.
    """
    random = np.random.default_rng(1)
    actual = accepted ** np.arange(1, 17)
    threshold = DraftThreshold()
    spent = sampled = without = 0.0
    with pytest.MonkeyPatch.context() as patch:
        if not controlled:
            patch.setattr(Control, "allows", lambda *_: True)
        for step in range(steps.stop):
            rows = rows_of(step)
            longest = int((threshold.value(rows) <= ACCEPTED).sum())
            drafting = -(-rows // 8) if threshold.is_probe else rows
            drafted = drafting * longest
            right = int((random.random((drafting, 1)) < actual[None, :longest]).sum())
            plain = 0.008 + 0.00016 * rows
            seconds = plain + 4e-5 * drafted
            noisy = seconds * random.lognormal(0, 0.15) * (30 if random.random() < 0.01 else 1)
            threshold.observe(seconds=noisy, rows=rows, drafted=drafted, sampled=rows + right)
            if step >= steps.start:
                spent += seconds
                sampled += rows + drafting * actual[:longest].sum()
                without += rows / plain * seconds
    return sampled / without, threshold


def test_control_stops_drafts_that_do_not_pay() -> None:
    by_threshold, _ = simulated_gain(
        accepted=0.38, rows_of=lambda _: 64, steps=range(1000, 3000), controlled=False
    )
    assert by_threshold < 0.6
    gain, threshold = simulated_gain(accepted=0.38, rows_of=lambda _: 64, steps=range(1000, 8000))
    assert gain > 0.97
    assert threshold.control.paused_steps > 5000


def test_control_costs_little_where_drafts_pay() -> None:
    always, _ = simulated_gain(accepted=0.8, rows_of=lambda _: 64, steps=range(1000, 5000), controlled=False)
    gain, threshold = simulated_gain(accepted=0.8, rows_of=lambda _: 64, steps=range(1000, 5000))
    assert threshold.control.gain > 1.3
    assert threshold.control.paused_steps == 0
    assert gain > 0.98 * always > 1.3


def test_drafts_are_tried_again_when_half_of_the_sequences_are_left() -> None:
    """In the tail of a batch a step waits for memory, and drafts pay where they did not."""
    gain, _ = simulated_gain(
        accepted=0.38, rows_of=lambda step: 64 if step < 3000 else 2, steps=range(3000, 4000)
    )
    assert gain > 1.3


def test_drafter_keeps_the_history_of_running_prompts() -> None:
    """Responses of the last epoch are older than the text of the completions that draft from them."""
    drafter = Drafter(4, 60 * PAGE, 16)
    prompt_t, response_t = tokens(1, 50), tokens(2, 20 * PAGE)
    drafter.remember(0, prompt_t, response_t)
    running = Running(drafter, 0, prompt_t)
    for other in range(1, 20):
        drafter.remember(other, tokens(100 + other, 50), tokens(200 + other, 10 * PAGE))
    idle, of_running = drafter.evicted_tokens
    assert idle > 100 * PAGE
    assert of_running == 0
    assert running.follow(response_t) < len(response_t) / 12

    drafter.end(running.slot)
    for other in range(20, 40):
        drafter.remember(other, tokens(100 + other, 50), tokens(200 + other, 10 * PAGE))
    again = Running(drafter, 0, prompt_t)
    assert again.follow(response_t) > len(response_t) / 2, "what no completion drafts from is not kept"


def test_drafter_overwrites_running_prompts_if_nothing_else_is_left() -> None:
    drafter = Drafter(4, 30 * PAGE, 16)
    prompt_t = tokens(1, 50)
    for i in range(4):
        drafter.remember(0, prompt_t, tokens(10 + i, 10 * PAGE))
        Running(drafter, 0, prompt_t).follow(tokens(20 + i, 10 * PAGE)[:4000])
    idle, of_running = drafter.evicted_tokens
    assert idle == 0 or of_running > idle
    assert of_running > 30 * PAGE
