"""Gradient norms of adapters against peft's: recorded, since peft is no dependency.

``UPDATE_GOLDEN=1`` with peft installed beside records them again: peft's model with the adapters' first values, plain autograd and
torch's AdamW in float32, in one process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_worker import SETTINGS, whole_batch

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.algo.losses.base import TokenBatch
from scalerl_trainer.models import load_model
from scalerl_trainer.models.lora import Adapters, Lora, adapter_config, peft_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).with_name("lora_peft.json")
LORA = (4, 8, ())
CHANGES = {"learning_rate": 0.3, "epsilon": 1e-2}
"""An epsilon far above rounding: with a small one, AdamW's first update is a gradient's sign, also of one that is nearly zero."""


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    return make_model(hidden_size=34, attention_heads=1, intermediate_size=51)  # type: ignore[no-any-return]


def with_peft(model: Path, folder: Path) -> dict[str, Any]:
    """Version of peft, and its gradient norms of three steps."""
    import peft
    from safetensors.torch import save_file

    own = load_model(str(model), dtype="float32")
    Adapters(own, Lora(*LORA))
    first = {peft_name(n): p.detach().clone() for n, p in own.named_parameters() if "lora_" in n}
    save_file(first, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(Lora(*LORA), first, str(model))))
    adapted = peft.PeftModel.from_pretrained(
        load_model(str(model), dtype="float32"), str(folder), is_trainable=True
    ).eval()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == len(first)
    settings = SETTINGS | CHANGES
    optimizer = torch.optim.AdamW(trained, lr=1.0, eps=float(settings["epsilon"]), weight_decay=0.01)
    norms = []
    for step in range(3):
        batch = whole_batch(step)
        logprobs = []
        for sequence in batch["sequences"]:
            ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
            logits = adapted(ids).logits[0].float()
            every = (logits / settings["temperature"]).log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            mask = torch.tensor(sequence.trainable, dtype=torch.bool)
            logprobs.append(every[len(sequence.prompt) - 1 :][mask])
        owner = torch.cat([torch.full((n,), i) for i, n in enumerate(batch["lengths"])])
        tokens = TokenBatch(
            torch.cat(logprobs),
            torch.cat(batch["generator"]),
            batch["advantages"][owner],
            batch["weights"][owner],
            owner,
        )
        optimizer.zero_grad()
        Cispo()(tokens).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, settings["max_gradient_norm"])))
        optimizer.param_groups[0]["lr"] = settings["learning_rate"] * min(1.0, (step + 1) / 2)
        optimizer.step()
    return {"peft": peft.__version__, "gradient_norms": norms}


def test_gradient_norms_are_peft_s_at_zero_0_1_and_3(
    module_processes: Any, model: Path, tmp_path: Path
) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(with_peft(model, tmp_path)) + "\n")
    golden = json.loads(GOLDEN.read_text())
    stages = (0, 1, 3)
    jobs = [
        {
            "do": "norms",
            "name": str(stage),
            "stage": stage,
            "dtype": "float32",
            "lora": LORA,
            "settings": CHANGES,
        }
        for stage in stages
    ]
    module_processes.run_ranks("lora_worker.py", 2, out=tmp_path, model=str(model), jobs=jobs, name="run")
    found = torch.load(tmp_path / "run-0.pt", weights_only=False)
    for stage in stages:
        assert found[str(stage)] == pytest.approx(golden["gradient_norms"], rel=1e-6), stage
