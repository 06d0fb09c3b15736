"""The examples of mid-training are what the generator would have sampled."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from scalerl_api.paths import RunPaths
from scalerl_api.spec import PromptSpec, RunSpec, ScratchModel
from scalerl_api.wire import INTERRUPTED
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_tasks import JsonlSource, Prompt, PromptError, open_task, task_problems
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer import mid_training
from scalerl_trainer.checkpoints.manifest import CheckpointError
from scalerl_trainer.checkpoints.write import Timings
from scalerl_trainer.checks import PrepareError
from scalerl_trainer.errors import BadBatchError, MidTrainingError, Stopped
from scalerl_trainer.mid_training import MidTraining
from scalerl_trainer.mid_training_examples import Pairs, held_out_examples, of_source, solved_pairs
from scalerl_trainer.mid_training_rows import keep_rows
from scalerl_trainer.models import write_scratch
from scalerl_trainer.prepare import prepare
from scalerl_trainer.sft import Progress, encode_pair, encode_shard, encode_usable


@pytest.mark.parametrize("form", ["Raw", "Chat"])
@pytest.mark.parametrize("eos", ["<eos>", None])
def test_examples_are_generators_tokens(tmp_path: Path, form: str, eos: str | None) -> None:
    sizes = ScratchModel(hidden_size=16, attention_heads=1, intermediate_size=16, vocabulary_size=300)
    write_scratch(tmp_path, sizes, ["1+1=2"], seed=0, dtype="float32", context_tokens=64)
    (tmp_path / "chat_template.jinja").write_text("<user>{{ messages[0].content }}\n<think>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "unk_token": "<unk>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 1]}))
    data = tmp_path / "task.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(9)))
    task = {"jsonl": {"path": str(data)}, "verifier": {"name": "exact"}, "heldOut": {"size": 2}}
    spec = RunSpec.model_validate(
        {
            "model": {"path": str(tmp_path), "contextTokens": 64},
            "task": task | {"prompt": {"format": form, "template": "{prompt} "}},
            "recipe": {"maxCompletionTokens": 8},
            "warmStart": {"steps": 1, "batchSize": 5},
            "budget": {"maxSteps": 1},
        }
    )
    tokenizer = ModelTokenizer(tmp_path, spec.task.prompt)
    codec = PromptCodec(tmp_path, spec.task.prompt, spec.model.context_tokens)
    opened = open_task(spec.task)
    prompts = [opened.train[i] for i in range(len(opened.train))]
    sampled = {tuple(codec.encode(prompt, 8).token_ids): prompt.answer for prompt in prompts}
    pairs = solved_pairs(spec, tmp_path)
    assert len(pairs) == 5
    for prompt, solution in pairs:
        example = encode_pair(tokenizer, prompt, solution)
        assert sampled[tuple(example.prompt)] == solution
        assert tokenizer.decode([example.completion]) == [solution], "the generator stops at its end"
        assert example.completion[-1] == (1 if eos else 7)


def own_file_run(tmp_path: Path, **warm_start: Any) -> RunSpec:
    """A task of 9 prompts, 2 of them held out, and ``warmStart.jsonl`` with the same 9 and one more; the model is prepared."""
    rows = [{"prompt": f"{i}+1=", "answer": f"{i + 1}", "solution": f"{i + 1}"} for i in range(10)]
    for name, count in (("task", 9), ("own", 10)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    sizes = {"layers": 1, "hiddenSize": 32, "attentionHeads": 1, "intermediateSize": 16}
    return RunSpec.model_validate(
        {
            "model": {"scratch": sizes, "dtype": "float32", "contextTokens": 32},
            "task": {
                "jsonl": {"path": str(tmp_path / "task.jsonl")},
                "verifier": {"name": "exact"},
                "heldOut": {"size": 2},
            },
            "recipe": {"maxCompletionTokens": 8},
            "warmStart": {"batchSize": 5, "jsonl": {"path": str(tmp_path / "own.jsonl")}, "steps": 99}
            | warm_start,
            "budget": {"maxSteps": 1},
        }
    )


def test_own_file_trains_on_no_held_out_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = own_file_run(tmp_path)
    paths = RunPaths(tmp_path)
    prepare(paths, spec, one_machine=True)
    held_out = open_task(spec.task).held_out
    texts = {held_out[index].text for index in range(2)}
    pairs = solved_pairs(spec, paths.base_model)
    trained = {pairs.source[int(index)].text for index in pairs.order}
    assert trained == {f"{i}+1=" for i in range(10)} - texts
    assert (
        "2 of 10 prompts are held out by task.heldOut or evaluation.sets, and not trained on" in caplog.text
    )
    rows = [{"prompt": text, "answer": "1", "solution": "1"} for text in texts]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(MidTrainingError, match=r"warmStart.jsonl: every prompt is held out"):
        solved_pairs(spec, paths.base_model)
    with pytest.raises(PrepareError, match=r"warmStart.jsonl: every prompt is held out"):
        prepare(paths, spec, one_machine=True)


def test_own_data_set_trains_on_its_solutions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Columns of other names, without an answer; the table that the preparation made is what is trained on."""
    (tmp_path / "own.csv").write_text("ask,say\n" + "".join(f"{i}+1=,it is {i + 1}\n" for i in range(10)))
    columns = {"prompt": "ask", "solution": "say"}
    own = {"files": [str(tmp_path / "own.csv")], "columns": columns}
    spec, paths = own_file_run(tmp_path, jsonl=None, dataset=own), RunPaths(tmp_path)
    prepare(paths, spec, one_machine=True)
    (tmp_path / "own.csv").unlink()
    pairs = solved_pairs(spec, paths.base_model)
    held_out = open_task(spec.task).held_out
    trained = {pairs.source[int(index)].text: pairs[rank][1] for rank, index in enumerate(pairs.order)}
    assert trained == {
        f"{i}+1=": f"it is {i + 1}" for i in range(10) if f"{i}+1=" not in {h.text for h in held_out}
    }
    assert "warmStart.dataset: 2 of 10 prompts are held out" in caplog.text
    rest = own_file_run(tmp_path, jsonl=None, dataset=own | {"columns": columns | {"solution": "sya"}})
    (problem,) = task_problems(rest, tmp_path / "other")
    assert problem.field == "warmStart.dataset"
    assert "no such file" in problem.text
    (tmp_path / "own.csv").write_text("ask,say\na,b\nc,\n")
    given = own | {"columns": columns | {"answer": "ask"}}
    (problem,) = task_problems(own_file_run(tmp_path, jsonl=None, dataset=given), tmp_path / "other")
    assert (
        "own.csv, line 3 has no solution: give each row a solution, or leave warmStart.dataset out"
        in problem.text
    )


def test_keep_rows_drops_torn_and_repeated_lines(tmp_path: Path) -> None:
    """A full disk cuts a line, to which the next one is appended."""
    path = tmp_path / "mid-training.jsonl"
    path.write_bytes(
        b'{"step": 0}\n{"step": 1, "lo{"step": 2}\n\x00\xff\n[]\n7\n{"step": 3}\n{"step": 4}\n{"step": 1}'
    )
    keep_rows(path, 4)
    assert path.read_text() == '{"step": 0}\n{"step": 3}\n'
    keep_rows(tmp_path / "none.jsonl", 4)


def test_encode_usable_replaces_bad_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that cannot be generated, one without a solution and one too long: the next good one takes their place."""
    spec = own_file_run(tmp_path)
    paths = RunPaths(tmp_path)
    prepare(paths, spec, one_machine=True)
    tokenizer = ModelTokenizer(paths.base_model, spec.task.prompt)
    read = JsonlSource.__getitem__

    def damaged(self: JsonlSource, index: int) -> Prompt:
        prompt = read(self, index)
        if prompt.text == "3+1=":
            raise PromptError("prompt 3 failed")
        return replace(prompt, solution={"4+1=": "", "5+1=": "1 " * 90}.get(prompt.text, prompt.solution))

    source = JsonlSource(tmp_path / "own.jsonl")
    monkeypatch.setattr(JsonlSource, "__getitem__", damaged)
    pairs = Pairs(source, spec.task.prompt, tokenizer, np.arange(10))
    found = [encode_usable(tokenizer, pairs, index, 64) for index in range(10)]
    texts = [tokenizer.decode([sequence.completion])[0] for sequence, _ in found]
    assert texts == ["1", "2", "3", "7", "7", "7", "7", "8", "9", "10"]
    problems = [problem for _, problem in found]
    assert problems[3] == "prompt 3 failed"
    assert "no solution" in problems[4]
    assert "more than trainer.microBatchTokens (64)" in problems[5]
    assert [bool(problem) for problem in problems] == [False] * 3 + [True] * 3 + [False] * 4
    with pytest.raises(BadBatchError, match="no usable example among 2; the first: prompt 3 failed"):
        encode_usable(tokenizer, Pairs(source, spec.task.prompt, tokenizer, np.array([3, 4])), 0, 64)


def test_held_out_examples_without_solution_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = own_file_run(tmp_path)
    paths = RunPaths(tmp_path)
    prepare(paths, spec, one_machine=True)
    tokenizer = ModelTokenizer(paths.base_model, spec.task.prompt)
    held_out = [open_task(spec.task).held_out[index] for index in range(2)]
    read = JsonlSource.__getitem__

    def damaged(self: JsonlSource, index: int) -> Prompt:
        prompt = read(self, index)
        return replace(prompt, solution="") if prompt.text == held_out[0].text else prompt

    monkeypatch.setattr(JsonlSource, "__getitem__", damaged)
    (found,) = held_out_examples(spec, paths.base_model)
    assert tokenizer.decode([found.completion]) == [held_out[1].solution]


def test_resume_with_other_examples_raises(tmp_path: Path) -> None:
    spec = own_file_run(tmp_path)
    begun = of_source(Progress(), spec, "a" * 64)
    saved = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(begun, steps=7)), type=Progress)
    assert of_source(saved, spec, "a" * 64) == saved
    with pytest.raises(
        MidTrainingError,
        match=r"warmStart.jsonl: the examples, digest bbbbbbbbbbbb, is not .* step 7, digest aaaaaaaaaaaa: put .* back",
    ):
        of_source(saved, spec, "b" * 64)


class Together:
    """Ranks in threads; counts the texts that each one encodes."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=30)
        self._values: list[Any] = [None] * world

    def gather(self, rank: int, value: Any, kind: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, call: Callable[[Any], Any]) -> list[Any]:
        ranks = [
            SimpleNamespace(rank=rank, world=self.world, all_gather=partial(self.gather, rank))
            for rank in range(self.world)
        ]
        with ThreadPoolExecutor(self.world) as pool:
            return [future.result() for future in [pool.submit(call, rank) for rank in ranks]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_encode_shard_encodes_own_examples_only(tmp_path: Path, world: int) -> None:
    """The ranks' shards are those of the whole batch, also where an example is replaced, and each example is encoded once."""
    spec = own_file_run(tmp_path)
    paths = RunPaths(tmp_path)
    prepare(paths, spec, one_machine=True)
    tokenizer = ModelTokenizer(paths.base_model, spec.task.prompt)
    asked: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            if index == 4:
                raise BadBatchError("pair 4 failed")
            return super().__getitem__(index)

    pairs = Counted((tokenizer.encode([f"{i}+1="])[0], f"{i + 1}") for i in range(10))
    batch = [7, 4, 1, 0, 3]
    whole = [encode_usable(tokenizer, pairs, index, 64)[0] for index in batch]
    asked.clear()
    found = Together(world).run(lambda ranks: encode_shard(ranks, tokenizer, pairs, batch, 64))
    texts = [[(one.prompt, one.completion) for one in own] for own, _, _ in found]
    assert texts == [[(one.prompt, one.completion) for one in whole[rank::world]] for rank in range(world)]
    total = sum(len(sequence.completion) for sequence in whole)
    assert [(tokens, problems) for _, tokens, problems in found] == [(total, ["pair 4 failed"])] * world
    assert sorted(asked) == [0, 1, 3, 4, 5, 7]

    def bad(ranks: Any) -> str:
        with pytest.raises(BadBatchError, match="no usable example among 10") as caught:
            encode_shard(ranks, tokenizer, pairs, batch, 1)
        return str(caught.value)

    assert len(set(Together(world).run(bad))) == 1, (
        "a rank with a bad share does not leave the others waiting"
    )

    class Unreadable(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("stale file handle")

    def unreadable(ranks: Any) -> None:
        with pytest.raises(BadBatchError, match="stale file handle"):
            encode_shard(ranks, tokenizer, Unreadable(pairs) if ranks.rank == 0 else pairs, batch, 64)

    Together(world).run(unreadable)


def test_examples_of_a_mix_have_its_proportions(tmp_path: Path) -> None:
    spec = own_file_run(tmp_path, jsonl=None, batchSize=2)
    (tmp_path / "task.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(90))
    )
    document = spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    first = {"name": "a", "weight": "0.75", **document.pop("task")}
    second = first | {"name": "b", "weight": "0.25", "prompt": {"template": "say {prompt}"}}
    second["heldOut"] = {"size": 3}
    mixed = RunSpec.model_validate(document | {"task": {"mix": [first, second]}})
    paths = RunPaths(tmp_path)
    prepare(paths, mixed, one_machine=True)
    pairs = solved_pairs(mixed, paths.base_model)
    assert len(pairs) == int((88 - 2) / 0.75), "as many as the first task has"
    texts = ModelTokenizer(paths.base_model, PromptSpec()).texts(
        [ids for ids, _ in (pairs[i] for i in range(80))]
    )
    assert abs(sum("say" in text for text in texts) - 20) < 2
    assert len(held_out_examples(mixed, paths.base_model)) == 2 + 3
    assert solved_pairs(mixed, paths.base_model).digest == pairs.digest


class OneRank:
    """The collectives of a single rank."""

    world, rank, is_leader, timeout_seconds = 1, 0, True, 60.0

    def broadcast(self, value: Any, kind: Any) -> Any:
        return value

    def all_gather(self, value: Any, kind: Any) -> list[Any]:
        return [value]


@pytest.fixture
def held(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[MidTraining, list[tuple[str, bool]], threading.Event]:
    """Mid-training that has ended, what it reports of failed checkpoints, and its stop. Parameter: its timings."""
    timings = {"timings": Timings(retry=0.0, blind_retry=0.0, last_retry=0.0)} | getattr(request, "param", {})
    reports: list[tuple[str, bool]] = []
    coordinator = SimpleNamespace(
        while_full=None,
        supervised=lambda *_, **__: "",
        checkpoint_failed=lambda step, reason, holding: reports.append((reason, holding)),
    )
    engine = SimpleNamespace(settings=SimpleNamespace(engine="DeepSpeed", zero_stage=1, dtype="float32"))
    stop = threading.Event()
    spec, paths = own_file_run(tmp_path, steps=1), RunPaths(tmp_path)
    training = MidTraining(engine, spec, paths, OneRank(), coordinator, stop, None, **timings)  # type: ignore[arg-type]
    return training, reports, stop


def test_reference_that_cannot_be_written_is_tried_again(
    held: tuple[MidTraining, list[tuple[str, bool]], threading.Event],
) -> None:
    training, reports, _ = held
    failures = ["No space left on device", "No space left on device"]

    def write() -> None:
        if failures:
            raise OSError(failures.pop())

    training.keep_weights(Progress(steps=3), write)
    assert not failures
    assert ("No space left on device", True) in reports
    assert reports[-1] == ("", False), "the coordinator shows it no more"


@pytest.mark.parametrize(
    "held", [{"timings": Timings(retry=0.1, blind_retry=0.1), "poll_seconds": 0.05}], indirect=True
)
def test_time_counts_while_the_weights_cannot_be_written(
    held: tuple[MidTraining, list[tuple[str, bool]], threading.Event],
) -> None:
    training, _, _ = held
    failures = ["No space left on device"] * 2
    asked: list[tuple[int, int]] = []
    training._coordinator.supervised = lambda steps, tokens, seconds, retry: (
        asked.append((steps, tokens)) or ""
    )

    def write() -> None:
        if failures:
            raise OSError(failures.pop())

    training.keep_weights(Progress(steps=3, tokens=7), write)
    assert set(asked) == {(3, 7)}


@pytest.mark.parametrize("held", [{"report_seconds": 0.0}], indirect=True)
@pytest.mark.parametrize("cancelled", [True, False])
def test_interruption_that_is_cancelled_during_a_hold(
    held: tuple[MidTraining, list[tuple[str, bool]], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    cancelled: bool,
) -> None:
    training, _, _ = held
    answers = [INTERRUPTED]

    def supervised(*_: Any, **__: Any) -> str:
        return answers[-1]

    def hold(done: Progress) -> None:
        if cancelled:
            answers.append("")

    training._coordinator.supervised = supervised
    monkeypatch.setattr(training, "_save_last", hold)
    monkeypatch.setattr(mid_training, "_row", lambda *_: {})
    with contextlib.nullcontext() if cancelled else pytest.raises(Stopped):
        assert not training._after_step(Progress(steps=3), SimpleNamespace(), 0.0)  # type: ignore[arg-type]


def test_stop_while_the_reference_cannot_be_written_loses_nothing(
    held: tuple[MidTraining, list[tuple[str, bool]], threading.Event],
) -> None:
    training, _, stop = held
    attempts: list[None] = []

    def write() -> None:
        attempts.append(None)
        stop.set()
        raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match="They are in the checkpoint of mid-training step 3"):
        training.keep_weights(Progress(steps=3), write)
    assert len(attempts) == 2, "once more after the stop"


def test_stop_of_another_rank_ends_a_call_that_waits_for_the_coordinators_volume(
    held: tuple[MidTraining, list[tuple[str, bool]], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _, stop = held
    monkeypatch.setattr(training._ranks, "all_gather", lambda state, kind: [state, (True, True)])

    def call() -> str:
        assert not stop.is_set()
        training._coordinator.while_full()
        assert stop.is_set()
        return "answer"

    assert training._with_leader(call) == "answer"
