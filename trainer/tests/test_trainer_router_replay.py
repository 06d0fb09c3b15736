"""Router replay: experts that are given, in the forward and backward pass of each family, with partitioned weights, and from the wire."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from free_port import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import FAMILIES, write_family
from test_trainer_routing import SIZES, TEXTS, inputs
from trainable_places import trainable_places

from scalerl_trainer.errors import BadBatchError, ModelError
from scalerl_trainer.models import Policy, load_model, write_scratch
from scalerl_trainer.models.router_replay import RouterReplay
from scalerl_trainer.models.routing import Routing, routers_of
from scalerl_trainer.packing import MicroBatch, RoutedExperts, Sequence, pack

CPU = torch.device("cpu")
MIXTURES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "Granite 3 MoE", "Qwen3-Next")


def model_of(name: str, folder: Path, *, checkpointing: bool = False) -> Any:
    family = next(family for family in FAMILIES if family.name == name)
    model = load_model(str(write_family(family, folder)), dtype="float32")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def micro_batch(experts_xlk: torch.Tensor | None, known_x: torch.Tensor | None = None) -> MicroBatch:
    ids_bt, positions_bt, at_m, target_m = inputs()
    if experts_xlk is not None and known_x is None:
        known_x = torch.ones(len(experts_xlk), dtype=torch.bool)
    zero_m = torch.zeros_like(at_m)
    return MicroBatch(ids_bt, positions_bt, at_m, target_m, zero_m, zero_m, experts_xlk, known_x)


def own_choices(model: Any) -> list[torch.Tensor]:
    """The experts that each later call of a router chooses, in the order of the calls."""
    chosen: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        chosen.append(next(each for each in output if not each.is_floating_point()).detach())

    for _, router in routers_of(model)[0]:
        router.register_forward_hook(keep)
    return chosen


def run(
    model: Any, replay: RouterReplay | None, micro: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities, and the gradients of their sum."""
    policy = Policy(model, fp32_head=True).train()
    model.zero_grad()
    tokens = micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m
    with replay.of(micro, CPU) if replay is not None else torch.enable_grad():
        logprobs_m, _ = policy(*tokens)
        logprobs_m.sum().backward()
    return logprobs_m.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def others(experts_xk: torch.Tensor, count: int) -> torch.Tensor:
    """Other experts than these: each one's successor."""
    return (experts_xk + 1) % count


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_own_experts_change_no_bit_and_others_are_used_where_they_are_known(
    name: str, tmp_path: Path
) -> None:
    model = model_of(name, tmp_path)
    chosen = own_choices(model)
    plain_m, plain = run(model, None, micro_batch(None))
    own_xlk = torch.stack(chosen, 1).to(torch.uint8)
    assert own_xlk.shape == (48, 2, 2)
    replay = RouterReplay(model)
    for micro in (micro_batch(own_xlk), micro_batch(None)):
        again_m, again = run(model, replay, micro)
        assert torch.equal(plain_m, again_m)
        assert all(torch.equal(plain[n], again[n]) for n in plain)
    known_x = torch.arange(48) % 3 > 0
    chosen.clear()
    other_xlk = others(own_xlk, 4)
    other_m, _ = run(model, replay, micro_batch(other_xlk, known_x))
    assert float((other_m - plain_m).abs().max()) > 1e-4
    for layer in range(2):
        assert torch.equal(chosen[layer][known_x], other_xlk[known_x, layer].long())
    assert torch.equal(chosen[0][~known_x], own_xlk[~known_x, 0].long()), "the others route themselves"
    chosen.clear()
    again_m, _ = run(model, replay, micro_batch(None))
    assert torch.equal(plain_m, again_m), "nothing is left of the micro-batch before"


def reference(
    block: Any, states_xd: torch.Tensor, experts_xk: torch.Tensor, normalised: bool
) -> torch.Tensor:
    """The block's output by hand: one token and one expert after another."""
    gate, experts = block.gate, block.experts
    p_xe = (states_xd @ gate.weight.T).float().softmax(-1)
    rows = []
    for state_d, p_e, chosen in zip(states_xd, p_xe, experts_xk.tolist(), strict=True):
        total = sum(p_e[e] for e in chosen) if normalised else 1.0
        row = torch.zeros_like(state_d)
        for e in chosen:
            gate_i, up_i = (experts.gate_up_proj[e] @ state_d).chunk(2)
            row = row + p_e[e] / total * (experts.down_proj[e] @ (F.silu(gate_i) * up_i))
        rows.append(row)
    out_xd = torch.stack(rows)
    if hasattr(block, "shared_expert"):
        out_xd = out_xd + block.shared_expert_gate(states_xd).sigmoid() * block.shared_expert(states_xd)
    return out_xd


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "normalised"), [("Mixtral", True), ("Qwen2-MoE", False), ("Qwen3-MoE", False), ("OLMoE", False)]
)
def test_other_experts_compute_what_is_computed_by_hand(name: str, normalised: bool, tmp_path: Path) -> None:
    model = model_of(name, tmp_path).double()
    model.config._experts_implementation = "eager"  # the others have no kernel for float64
    assert getattr(model.config, "norm_topk_prob", True) == normalised
    replay = RouterReplay(model)
    block = model.model.layers[1].mlp
    generator = torch.Generator().manual_seed(1)
    states_xd = torch.randn(48, 64, dtype=torch.float64, generator=generator)
    experts_xlk = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(96)]).view(48, 2, 2)
    with replay.of(micro_batch(experts_xlk), CPU):
        found_xd = block(states_xd[None])
    weights = [block.gate.weight, block.experts.down_proj]
    gradients = torch.autograd.grad(found_xd.square().sum(), weights)
    wanted_xd = reference(block, states_xd, experts_xlk[:, 1], normalised)
    torch.testing.assert_close(found_xd[0], wanted_xd, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(wanted_xd.square().sum(), weights)
    torch.testing.assert_close(gradients, wanted, rtol=1e-3, atol=1e-3)
    assert float(gradients[0].norm(dim=1).min()) > 0, "each router's row has a gradient"
    only = torch.zeros_like(experts_xlk)
    only[..., 1] = 1
    with replay.of(micro_batch(only), CPU):
        (rows_ed,) = torch.autograd.grad(block(states_xd[None]).square().sum(), weights[:1])
    assert float(rows_ed[:2].abs().max()) > 0
    if normalised:
        assert float(rows_ed[2:].norm()) < 1e-4 * float(rows_ed.norm()), "others have no part but by rounding"


@pytest.mark.slow
def test_recomputed_layers_have_the_same_experts(tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        model = model_of("Qwen3-MoE", tmp_path / str(checkpointing), checkpointing=checkpointing)
        chosen = own_choices(model)
        run(model, None, micro_batch(None))
        other_xlk = others(torch.stack(chosen[:2], 1), 4)
        replay = RouterReplay(model)
        chosen.clear()
        found.append(run(model, replay, micro_batch(other_xlk)))
        assert len(chosen) >= (3 if checkpointing else 2), "layers were recomputed"
        for experts_xk in chosen:
            assert any(torch.equal(experts_xk, other_xlk[:, layer]) for layer in range(2))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-5, atol=1e-7)


def test_models_without_such_routers_are_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no routers that transformers records"):
        RouterReplay(load_model(str(make_model()), dtype="float32"))
    with pytest.raises(ModelError, match=r"PhimoeTopKRouter.* do not choose experts by one topk"):
        RouterReplay(model_of("Phi-3.5-MoE", tmp_path))


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    write_scratch(tmp_path, SIZES, TEXTS, seed=1, dtype="float32", context_tokens=64)
    replay = RouterReplay(load_model(str(tmp_path), dtype="float32"))
    good = torch.arange(2).expand(48, 2, 2)
    replay.check(micro_batch(good))
    replay.check(micro_batch(good + 6))
    replay.check(micro_batch(None))
    replay.check(micro_batch(torch.zeros_like(good), torch.zeros(48, dtype=torch.bool)))
    for bad, says in [
        (good[:, :1], "2 experts in each of 1 layers; layer 1"),
        (good[:, :, :1], "1 experts in each of 2 layers; layer 0 of the model has 2"),
        (good + 7, "beyond its 8"),
        (good - 1, "beyond its 8"),
        (torch.zeros_like(good), "twice for a token"),
    ]:
        with pytest.raises(BadBatchError, match=says):
            replay.check(micro_batch(bad))


@st.composite
def recorded(draw: st.DrawFn) -> list[Sequence]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        prompt, completion = draw(st.integers(1, 6)), draw(st.integers(0, 8))
        length = prompt + completion
        ids = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        keep = draw(st.lists(st.booleans(), min_size=completion, max_size=completion))
        routed = None
        if draw(st.booleans()):
            positions = np.flatnonzero(
                draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))
            )
            # The experts name the token they are of.
            values = np.array([[[ids[at], at]] * 3 for at in positions], np.int16).reshape(-1, 3, 2)
            routed = RoutedExperts(positions, values)
        found.append(Sequence(ids[:prompt], ids[prompt:], keep, routed))
    return found


@settings(deadline=None)
@given(recorded(), st.booleans())
def test_packed_experts_are_at_their_tokens(sequences: list[Sequence], shared_rows: bool) -> None:
    packed = pack(sequences, 20, shared_rows=shared_rows)
    known = 0
    for micro in packed.micro_batches:
        if micro.known_x is None or micro.experts_xlk is None:
            continue
        known += int(micro.known_x.sum())
        ids_x, at_x = micro.input_ids_bt.flatten(), micro.position_ids_bt.flatten()
        for x in micro.known_x.nonzero().flatten().tolist():
            assert micro.experts_xlk[x].tolist() == [[int(ids_x[x]), int(at_x[x])]] * 3
    wanted = 0
    for sequence in sequences:
        if sequence.routed is not None and trainable_places(sequence):
            last = len(sequence.prompt) + trainable_places(sequence)[-1]
            wanted += int((np.asarray(sequence.routed.positions) < last).sum())
    assert packed.routed == known == wanted


@pytest.mark.slow
def test_ranks_replay_as_one(tmp_path: Path, processes: Any) -> None:
    """The same steps at every ZeRO stage and with FSDP2 as on one rank, with a proximal policy of one update before."""
    write_scratch(tmp_path, SIZES, TEXTS, seed=1, dtype="float32", context_tokens=64)
    found: dict[Any, Any] = {}
    cases = [(0, 1, False, "none"), (0, 1, False, "other"), (1, 2, False, "other"), (3, 2, True, "other")]
    for stage, world, checkpointing, record in [*cases, ("FSDP2", 2, True, "other")]:
        port, pipes = free_port(), []
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            common = {"world": world, "port": port, "folder": str(tmp_path), "stage": stage, "rank": rank}
            common |= {"pipe": theirs, "checkpointing": checkpointing, "record": record}
            processes.run("replay_worker.py", REPLAY=common)
            theirs.close()
            pipes.append(ours)
        results = []
        for pipe in pipes:
            assert pipe.poll(240), (stage, world, "a rank waits for another")
            results.append(pipe.recv())
        assert all(result["stats"] == results[0]["stats"] for result in results)
        found[stage, record] = results[0]["stats"]
    none, alone = found.pop((0, "none")), found.pop((0, "other"))
    assert none["unreplayed"] == [72, 72]
    assert alone["unreplayed"] == [72 - 9 * 5, 72 - 9 * 5], (
        "three of the eight computed tokens of each have no record"
    )
    assert alone["loss"][0] != pytest.approx(none["loss"][0], rel=1e-4)
    for result in found.values():
        assert result["unreplayed"] == alone["unreplayed"]
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)


def test_proximal_policy_has_the_same_experts(tmp_path: Path) -> None:
    write_scratch(tmp_path, SIZES, TEXTS, seed=1, dtype="float32", context_tokens=64)
    first, second = (load_model(str(tmp_path), dtype="float32") for _ in range(2))
    replay = RouterReplay(first)
    replay.attach(second)
    micro = micro_batch(torch.tensor([3, 5]).expand(48, 2, 2))
    chosen = own_choices(second)
    assert torch.equal(run(first, replay, micro)[0], run(second, replay, micro)[0])
    assert all((experts_xk == torch.tensor([3, 5])).all() for experts_xk in chosen)


def test_figures_count_the_replayed_experts(tmp_path: Path) -> None:
    write_scratch(tmp_path, SIZES, TEXTS, seed=1, dtype="float32", context_tokens=64)
    model = load_model(str(tmp_path), dtype="float32")
    replay, routing = RouterReplay(model), Routing(model)
    micro = micro_batch(torch.tensor([3, 5]).expand(48, 2, 2))
    policy = Policy(model, fp32_head=True).eval()
    with replay.of(micro, CPU), routing.counted(micro.predict_at_m):
        policy(micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
    loads = routing.take(CPU).view(2, 9)[:, 1:]
    assert loads.tolist() == [[0, 0, 0, 7, 0, 7, 0, 0]] * 2
