"""Statistics of routers, and mixtures of experts on two ranks."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from free_port import free_port
from model_families import FAMILIES, write_family

from scalerl_api.memory.model_size import ModelSize
from scalerl_api.model_source import ScratchExperts
from scalerl_api.spec import ScratchModel
from scalerl_trainer.models import Policy, load_model, write_scratch
from scalerl_trainer.models.routing import LOAD_MAX, LOAD_MIN, ROUTER_ENTROPY, Routing

TEXTS = [f"{i} + {i} = {2 * i}" for i in range(100)]
MIXTURES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "Phi-3.5-MoE", "Granite 3 MoE", "Qwen3-Next")
SIZES = ScratchModel(
    layers=2,
    hidden_size=32,
    attention_heads=2,
    intermediate_size=48,
    vocabulary_size=300,
    initializer_range="0.2",
    experts=ScratchExperts(count=8, per_token=2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_scratch(path, SIZES, TEXTS, seed=1, dtype="float32", context_tokens=64)
    return path


def test_scratch_model_of_experts_is_a_mixtral_of_the_size_that_is_estimated(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    assert type(model).__name__ == "MixtralForCausalLM"
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (8, 2)
    filled = SIZES.model_copy(update={"vocabulary_size": model.config.vocab_size})
    assert ModelSize.of_scratch(filled).parameters == sum(p.numel() for p in model.parameters())
    experts = model.model.layers[1].mlp.experts
    assert float(experts.gate_up_proj.detach().std()) == pytest.approx(0.2, rel=0.05)
    assert not torch.equal(experts.down_proj[0], experts.down_proj[1])


def inputs(batch: int = 3, length: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids_bt = torch.randint(3, 90, (batch, length), generator=generator)
    positions_bt = torch.arange(length).expand(batch, length)
    at_m = torch.tensor([2, 3, 5, 17, 30, 31, 40])
    return ids_bt, positions_bt, at_m, ids_bt.flatten()[at_m + 1]


def expected(model: Any, tokens: tuple[torch.Tensor, ...], chosen: int) -> dict[str, float]:
    """The figures from the logits that transformers records, one token after another."""
    ids_bt, positions_bt, at_m, _ = tokens
    with torch.no_grad():
        output = model(
            input_ids=ids_bt, position_ids=positions_bt, use_cache=False, output_router_logits=True
        )
    entropies, loads = [], []
    for logits_xe in output.router_logits:
        load = [0] * logits_xe.shape[-1]
        for at in at_m.tolist():
            row = logits_xe.flatten(0, -2)[at].double()
            p = torch.softmax(row, -1)
            entropies.append(-sum(float(x) * math.log(float(x)) for x in p))
            for expert in row.argsort(descending=True)[:chosen].tolist():
                load[expert] += 1
        loads += [count * len(load) / sum(load) for count in load]
    return {
        ROUTER_ENTROPY: sum(entropies) / len(entropies),
        LOAD_MAX: max(loads),
        LOAD_MIN: min(loads),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_figures_are_those_of_the_logits_that_transformers_records(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = load_model(str(write_family(family, tmp_path)), dtype="float32")
    tokens = inputs()
    chosen = 1 if name == "Phi-3.5-MoE" else 2
    policy, routing = Policy(model, fp32_head=True).eval(), Routing(model)
    wanted = expected(model.eval(), tokens, 2)
    policy(*tokens)
    assert float(routing.take(torch.device("cpu")).sum()) == 0, "counted outside of the context"
    with routing.counted(tokens[2]):
        policy(*tokens)
    found = routing.figures(routing.take(torch.device("cpu")), len(tokens[2]))
    assert found[ROUTER_ENTROPY] == pytest.approx(wanted[ROUTER_ENTROPY], rel=1e-5)
    assert found[ROUTER_ENTROPY] > 0.1
    if chosen == 2:  # Phi's second expert is chosen among those near the first
        assert found[LOAD_MAX] == pytest.approx(wanted[LOAD_MAX])
        assert found[LOAD_MIN] == pytest.approx(wanted[LOAD_MIN])
    assert 0 <= found[LOAD_MIN] <= 1 <= found[LOAD_MAX]


def test_recomputed_layers_count_once(folder: Path) -> None:
    sums = []
    for checkpointing in (False, True):
        model = load_model(str(folder), dtype="float32")
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy, routing, tokens = Policy(model, fp32_head=True).train(), Routing(model), inputs()
        with routing.counted(tokens[2]):
            logprobs_m, _ = policy(*tokens)
        logprobs_m.sum().backward()
        sums.append(routing.take(torch.device("cpu")))
    assert sums[0].view(2, 9)[:, 1:].sum(1).tolist() == [14, 14], "two experts of each of seven tokens"
    torch.testing.assert_close(sums[0], sums[1])


def test_dense_model_has_no_figures(make_model: Callable[..., Path]) -> None:
    model = load_model(str(make_model()), dtype="float32")
    routing = Routing(model)
    sums = routing.take(torch.device("cpu"))
    assert sums.numel() == 0
    assert routing.figures(sums, 7) == {}


@pytest.mark.slow
def test_ranks_with_different_experts_train_as_one(folder: Path, processes: Any) -> None:
    """Rank 1 has two tokens, then none, so most experts get none there; at every ZeRO stage, and on one rank."""
    found = {}
    for stage, world, checkpointing in [(0, 1, False), *((s, 2, False) for s in range(4)), (3, 2, True)]:
        port, pipes = free_port(), []
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            given = {"world": world, "port": port, "folder": str(folder), "stage": stage, "rank": rank}
            given |= {"pipe": theirs, "checkpointing": checkpointing}
            processes.run("routing_worker.py", ROUTING=given)
            theirs.close()
            pipes.append(ours)
        results = []
        for pipe in pipes:
            assert pipe.poll(240), (stage, world, "a rank waits for another")
            results.append(pipe.recv())
        assert all(result["figures"] == results[0]["figures"] for result in results)
        found[stage, world, checkpointing] = results[0]
        if world == 2:
            assert results[1]["own experts"] <= 4, "rank 1 uses few of the 8 experts of a layer"
    alone = found.pop((0, 1, False))
    assert alone["figures"][0][LOAD_MAX] > 1
    assert alone["norms"][0] > 0.01
    for result in found.values():
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for step, figures in enumerate(result["figures"]):
            assert figures == pytest.approx(alone["figures"][step], rel=1e-5)
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-4)
