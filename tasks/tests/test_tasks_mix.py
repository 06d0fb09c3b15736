"""The tasks of a mix, opened together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from scalerl_api.spec import PromptSpec, RunSpec
from scalerl_tasks import MixedTaskError, Prompt, SourceError, TokenizerError, open_tasks, render_prompt
from scalerl_tasks.tokenizer import ModelTokenizer


def mixed(folder: Path, **second: Any) -> RunSpec:
    """Two files that share the prompts 5+1= to 9+1=."""
    for name, numbers in (("a", range(10)), ("b", range(5, 15))):
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    tasks = [
        {"name": name, "weight": "0.5", "jsonl": {"path": f"{name}.jsonl"}, "heldOut": {"size": 4}}
        | {"verifier": {"name": "exact"}}
        for name in ("a", "b")
    ]
    return RunSpec.model_validate(
        {"model": {"scratch": {}}, "task": {"mix": [tasks[0], tasks[1] | second]}, "budget": {"maxSteps": 1}}
    )


def test_held_out_text_of_a_task_is_trained_on_in_none(tmp_path: Path) -> None:
    opened = open_tasks(mixed(tmp_path), tmp_path)
    held_out = {task.held_out[at].text for task in opened.tasks for at in range(4)}
    for task in opened.tasks:
        assert held_out.isdisjoint(task.train[at].text for at in range(len(task.train)))


def test_digest_depends_on_weights_and_data(tmp_path: Path) -> None:
    spec = mixed(tmp_path)
    assert spec.task.mix is not None
    first = open_tasks(spec, tmp_path).digest
    assert open_tasks(spec, tmp_path).digest == first
    weights = [
        one.model_copy(update={"weight": w}) for one, w in zip(spec.task.mix, ("0.6", "0.4"), strict=True)
    ]
    other = spec.model_copy(update={"task": spec.task.model_copy(update={"mix": weights})})
    assert open_tasks(other, tmp_path).digest != first
    assert open_tasks(mixed(tmp_path, heldOut={"size": 3}), tmp_path).digest != first


def test_problem_of_a_task_names_its_field(tmp_path: Path) -> None:
    with pytest.raises(MixedTaskError, match=r"task.mix.1 \(b\): ") as refused:
        open_tasks(mixed(tmp_path, jsonl={"path": "none.jsonl"}), tmp_path)
    assert isinstance(refused.value.problem, SourceError)


def test_chat_template_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0, "<|user|>": 1, "hi": 2, "x": 3}, unk_token="x"))
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    own = PromptSpec(format="Chat", chat_template="<|user|> {{ messages[0].content }} <|end|>")
    rendered = render_prompt(Prompt("1", "hi", ""))
    assert ModelTokenizer(tmp_path, own).encode_prompts([rendered]) == [[1, 2, 0]]
    foreign = PromptSpec(format="Chat", chat_template="<|im_start|>{{ messages[0].content }}")
    with pytest.raises(TokenizerError, match=r"task.mix.1.prompt.chatTemplate: <\|im_start\|> is no token"):
        ModelTokenizer(tmp_path, foreign, "task.mix.1.prompt")
