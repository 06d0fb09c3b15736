"""One of each other kind of plugin, as short as its interface allows; docs/plugins.md has the table."""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np

LEN = 2
"""Tokens of context that have to agree for a draft."""


class Windowed:
    """A loss, ``recipe.loss.plugin: {name: windowed, parameters: {gap: "1"}}``: REINFORCE of the tokens whose log-probabilities differ
    by at most ``gap`` nats."""

    token_local = True

    def __init__(self, gap: str = "1") -> None:
        self.gap = float(gap)

    def __call__(self, tokens):
        from scalerl_trainer.algo.losses import LossOutput

        gap_n = (tokens.logprobs_n - tokens.generator_logprobs_n).detach().abs()
        objective_n = tokens.advantages_n * tokens.logprobs_n * (gap_n <= self.gap)
        return LossOutput(
            -(tokens.weights_n * objective_n).sum(), {"windowed_out": (gap_n > self.gap).float().sum()}
        )


class Guess:
    """An environment, ``task.environment: {name: guess, parameters: {hint: false}}``: the answer is a number that the model guesses."""

    def __init__(self, hint: bool = True) -> None:
        self.hint = hint

    def step(self, prompt, replies):
        from scalerl_tasks.environments.protocol import Step

        guess, answer = replies[-1].strip(), int(prompt.answer)
        if not guess.isdecimal():
            return Step(["That is no number."])
        if int(guess) == answer:
            return Step(done=True, reward=1.0)
        return Step([("higher" if answer > int(guess) else "lower") if self.hint else "no"])


class NewestFirst:
    """A schedule, ``schedule.plugin: {name: newest-first}``: the slots in reverse, each to the generator with the most capacity left."""

    def assign(self, inputs):
        assigned = {one.name: [] for one in inputs.generators}
        capacity = Counter({one.name: one.capacity for one in inputs.generators})
        for slot in reversed(inputs.slots):
            ((name, most),) = capacity.most_common(1) or (("", 0),)
            if most < 1:
                break
            assigned[name].append(slot)
            capacity[name] -= 1
        return assigned


class JsonTracker:
    """A tracker, ``trackers.plugin: {name: json-lines, parameters: {file: rows.jsonl}}``: each row as a line in the run directory."""

    clears_on_open = True

    def __init__(self, run, paths, file: str = "rows.jsonl") -> None:
        self.path = Path(paths.root) / file

    def open(self):
        self.file = self.path.open("w")
        return 0, set()

    def write(self, steps, points, samples) -> None:
        for number, row in (*steps, *points):
            self.file.write(json.dumps({"step": number} | dict(row)) + "\n")

    def close(self) -> None:
        self.file.close()


class Repeats:
    """A drafter, ``speculation.history.drafter: {name: repeats}``: what followed the last two tokens earlier in the completion."""

    evicted_tokens = (0, 0)

    def __init__(self, sequences: int, memory_tokens: int, max_draft_tokens: int) -> None:
        self.most, self.free, self.known = max_draft_tokens, list(range(sequences)), {}
        self.draft_sd = np.zeros((sequences, max_draft_tokens), np.int32)
        self.drafted_s = np.zeros(sequences, np.int32)
        self.tally_skd = np.zeros((sequences, 2, max_draft_tokens), np.int64)

    def remember(self, prompt, prompt_t, response_t) -> None:
        """It uses no past responses."""

    def begin(self, prompt, prompt_t) -> int:
        slot = self.free.pop()
        self.known[slot], self.drafted_s[slot], self.tally_skd[slot] = len(prompt_t), 0, 0
        return slot

    def end(self, slot: int) -> None:
        self.free.append(slot)

    def take_tally(self, slot: int):
        tally = self.tally_skd[slot].copy()
        self.tally_skd[slot] = 0
        return tally

    def propose(self, slot_r, row_r, rows_rt, length_r, limit_r, threshold):
        accepted = verified = 0
        for slot, row, length, limit in zip(slot_r, row_r, length_r, limit_r, strict=True):
            text, drafted = rows_rt[row, :length], int(self.drafted_s[slot])
            new = text[self.known[slot] :][:drafted]
            right = int(np.cumprod(new == self.draft_sd[slot, : len(new)]).sum())
            self.tally_skd[slot, 0, :drafted] += 1
            self.tally_skd[slot, 1, :right] += 1
            accepted, verified, self.known[slot] = accepted + right, verified + drafted, int(length)
            ends = [
                i
                for i in range(LEN, length)
                if np.array_equal(text[i - LEN : i], text[length - LEN : length])
            ]
            draft = text[ends[-1] :][: min(limit, self.most)] if ends else text[:0]
            self.draft_sd[slot, : len(draft)], self.drafted_s[slot] = draft, len(draft)
        return self.draft_sd, self.drafted_s, accepted, verified


class Rehearsal:
    """A runtime, ``scalerl run FILE --runtime rehearsal``: starts nothing, and prints what the lifecycle asks for."""

    def __init__(self, run, plan, directory) -> None:
        from scalerl_lifecycle.lifecycle_types import NOTHING, PersistedState

        self.persisted = PersistedState()
        self.asked = NOTHING
        self.commands = {one.role: one.containers[0].argv for one in plan.workloads}
        self.replicas = {one.role: one.replicas for one in plan.workloads}

    async def observe(self):
        from scalerl_lifecycle.lifecycle_types import Job, JobState, LifecycleInput, Service

        asked, there = self.asked, {True: JobState.COMPLETE, False: JobState.ABSENT}
        attempt = asked.trainer or 0
        return LifecycleInput(
            unix_seconds=time.time(),
            prepare=Job(there[asked.prepare]),
            trainer=Job(there[attempt > 0], attempt),
            coordinator=Service(ready=int(asked.coordinator)),
            generators=Service(ready=self.replicas["generator"] if asked.generators else 0),
            serving=asked.coordinator,
            status=self.status(attempt) if asked.coordinator else None,
        )

    def status(self, attempt: int):
        import msgspec

        from scalerl_api.wire import Status

        zeros = {str: "", int: 0, float: 0.0}
        fields = {f.name: zeros.get(f.type) for f in msgspec.structs.fields(Status) if f.required}
        lists = {"members": [], "points": [], "last_step_stats": {}}
        from scalerl_api.wire import Counts

        counts = {f.name: 0 for f in msgspec.structs.fields(Counts) if f.required}
        over = {"stop_reason": "maxSteps", "phase": "finished"} if attempt else {"phase": "waiting"}
        return msgspec.convert(fields | lists | {"counts": counts} | over, Status)

    async def record(self, decision) -> None:
        self.persisted = decision.persisted

    async def apply(self, decision) -> None:
        for role, command in self.commands.items():
            field = {"generator": "generators"}.get(role, role)
            if getattr(decision.wanted, field) and not getattr(self.asked, field):
                print(f"{role}: {' '.join(command[:3])}")
        self.asked = decision.wanted


def add_countdown(commands: argparse._SubParsersAction) -> None:
    """A command, ``scalerl countdown 3``; this module is imported whenever ``scalerl`` runs, so the function has its own imports."""
    command = commands.add_parser("countdown", help="print problems of the example package")
    command.add_argument("count", type=int)
    command.set_defaults(function="other_kinds:print_countdown")


def print_countdown(arguments: argparse.Namespace) -> int:
    from countdown_task import Countdown

    source = Countdown(size=arguments.count)
    for index in range(len(source)):
        print(source[index].text)
    return 0
