"""Whole runs with adapters: what generators get, what checkpoints and exports contain, and a resumption after a kill."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_run import model_state, until
from transformers import AutoModelForCausalLM

from scalerl_trainer.export import ExportError, export_checkpoint

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8, "targetModules": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_run_with_adapters(new_run: Any, zero_stage: int) -> None:
    run = new_run(
        trainer__zeroStage=zero_stage, trainer__lora=LORA, recipe__kl={"penalty": {"coefficient": "0.1"}}
    )
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    first, last = torch.load(directory / "v0.pt"), torch.load(directory / "v6.pt")
    changed = {name for name in last if not torch.equal(last[name], first[name])}
    assert changed == {n for n in last if n.split(".")[-2] in LORA["targetModules"]}
    rows = run.rows()
    assert rows[0]["reference_kl"] == pytest.approx(0.0, abs=1e-7)
    assert rows[-1]["reference_kl"] > 0
    saved = model_state(run.paths.checkpoint(6))
    assert {name.rpartition(".")[2] for name in saved} == {"lora_A", "lora_B"}
    until(lambda: run.exported() == 6)
    exported = load_file(run.paths.root / run.status().exports.last.path / "model.safetensors")
    assert all(torch.equal(last[name], exported[name]) for name in last)
    target = run.paths.root / "exported"
    assert export_checkpoint(run.paths, target) == 6
    by_hand = load_file(target / "model.safetensors")
    assert by_hand.keys() == last.keys()
    for name, tensor in by_hand.items():
        torch.testing.assert_close(tensor, last[name], rtol=0, atol=1e-7)
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.model_type == "llama"


def test_killed_rank_resumes_adapters_and_exports_them(new_run: Any) -> None:
    run = new_run(
        trainer__lora=LORA | {"export": "Adapter"},
        trainer__zeroStage=3,
        budget__maxSteps=8,
        checkpoint__everySteps=2,
    )
    directory = run.start(seconds_per_group=0.1, slots=28)
    until(lambda: run.step() >= 3 and run.checkpoints())
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGKILL)
    run.wait_trainer()
    run.permit(directory)
    step = run.checkpoints()[-1]
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {step}," in run.log("trainer-0")
    until(lambda: run.exported() == 8)
    folder = run.paths.root / run.status().exports.last.path
    assert not (folder / "config.json").exists()
    assert (folder / "tokenizer.json").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, LORA["targetModules"])
    adapters = load_file(folder / "adapter_model.safetensors")
    saved = model_state(run.paths.checkpoint(8))
    assert adapters.keys() == {f"base_model.model.{name}.weight" for name in saved}
    for name, value in saved.items():
        torch.testing.assert_close(adapters[f"base_model.model.{name}.weight"], value, rtol=0, atol=0)
    name = "model.layers.1.mlp.down_proj"
    first, last = torch.load(directory / "v0.pt"), torch.load(directory / "v8.pt")
    change = 2.0 * saved[f"{name}.lora_B"] @ saved[f"{name}.lora_A"]
    torch.testing.assert_close(last[f"{name}.weight"], first[f"{name}.weight"] + change, rtol=1e-6, atol=1e-7)
    target = run.paths.root / "exported"
    assert export_checkpoint(run.paths, target) == 8
    by_hand = load_file(target / "adapter_model.safetensors")
    assert all(torch.equal(by_hand[name], adapters[name]) for name in adapters)


def test_adapters_of_other_weights_are_refused(new_run: Any) -> None:
    """The model's file, which may be linked from model.path, is written again: until it is put back, no step is trained."""
    run = new_run(trainer__lora=LORA, trainer__replicas=1, checkpoint__everySteps=2, budget__maxSteps=6)
    directory = run.start(slots=12)
    until(lambda: run.checkpoints() == [2], what="a checkpoint")
    os.kill(run.ranks[0].pid, signal.SIGKILL)
    run.wait_trainer()
    run.permit(directory)
    file = run.paths.base_model / "model.safetensors"
    content = file.read_bytes()
    save_file({name: 1.1 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    run.start_trainer()
    assert run.wait_trainer() == [2]
    assert "has adapters of other weights than the files of the model have now" in run.log("trainer-0")
    with pytest.raises(ExportError, match="adapters of other weights"):
        export_checkpoint(run.paths, run.paths.root / "exported")
    file.write_bytes(content)
    run.start_trainer()
    assert run.wait_trainer() == [0]
    assert [row["step"] for row in run.rows()] == list(range(6))


def test_target_that_names_no_layer_ends_the_trainer(new_run: Any) -> None:
    run = new_run(trainer__lora={"targetModules": ["query"]})
    run.start()
    assert run.wait_trainer() == [2, 2]
    assert "trainer.lora.targetModules: 'query' names no linear layer of llama; there are" in run.log(
        "trainer-0"
    )
