"""A random use of a drafter with a small memory, checked as it goes."""

import numpy as np

from scalerl_generator.drafts.drafter import Drafter


def walk(seed: int, steps: int) -> None:
    random = np.random.default_rng(seed)
    sequences, most = 5, int(random.integers(1, 9))
    drafter = Drafter(sequences, int(random.integers(1, 2000)), most)
    vocabulary = int(random.integers(2, 40))
    rows_rt = np.zeros((sequences, 700), np.int32)
    prompts = [random.integers(0, vocabulary, random.integers(1, 200)).astype(np.int32) for _ in range(4)]
    length_of: dict[int, int] = {}
    row_of: dict[int, int] = {}
    for _ in range(steps):
        action = random.random()
        prompt = int(random.integers(0, 4))
        if action < 0.1:
            drafter.remember(
                prompt,
                prompts[prompt],
                random.integers(0, vocabulary, random.integers(0, 300)).astype(np.int32),
            )
        elif action < 0.3 and len(row_of) < sequences:
            slot = drafter.begin(prompt, prompts[prompt])
            row = row_of[slot] = min(set(range(sequences)) - set(row_of.values()))
            length_of[slot] = len(prompts[prompt])
            rows_rt[row, : length_of[slot]] = prompts[prompt]
        elif action < 0.4 and row_of:
            slot = int(random.choice(list(row_of)))
            drafter.end(slot)
            del row_of[slot], length_of[slot]
        stepping = [slot for slot in row_of if random.random() < 0.8 and length_of[slot] < 650]
        for slot in stepping:
            new = random.integers(0, vocabulary, random.integers(1, most + 2))
            rows_rt[row_of[slot], length_of[slot] : length_of[slot] + len(new)] = new
            length_of[slot] += len(new)
        limit_r = random.integers(0, most + 2, len(stepping)).astype(np.int32)
        draft_sd, drafted_s, accepted, verified = drafter.propose(
            np.array(stepping, np.int32),
            np.array([row_of[slot] for slot in stepping], np.int32),
            rows_rt,
            np.array([length_of[slot] for slot in stepping], np.int32),
            limit_r,
            float(random.uniform(0, 1)),
        )
        assert 0 <= accepted <= verified
        for slot, limit in zip(stepping, limit_r, strict=True):
            assert 0 <= drafted_s[slot] <= min(limit, most)
            draft = draft_sd[slot, : drafted_s[slot]]
            assert ((draft >= 0) & (draft < vocabulary)).all(), "a draft of tokens that no response has"
