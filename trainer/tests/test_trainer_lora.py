"""Adapters: gradients, merged weights, checkpoints, at every ZeRO stage on one and two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_worker import SETTINGS, whole_batch
from engines_and_stages import Stage

from scalerl_trainer.algo.losses import Cispo, TokenBatch
from scalerl_trainer.checkpoints.engine_files import HEADER, SavedState
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models import load_model
from scalerl_trainer.models.lora import Adapters, Lora, LoraLinear, adapter_config, peft_name
from scalerl_trainer.models.structure import problems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = (4, 8, ())
Shape = tuple[int, Stage, str]
"""Ranks, stage, dtype."""
SHAPES: list[Shape] = [
    *((world, stage, "float32") for world in (1, 2) for stage in (*range(4), "FSDP2")),
    (2, 1, "bfloat16"),
    (2, "FSDP2", "bfloat16"),
    (2, "3 offload", "float32"),
    (2, "FSDP2 offload", "float32"),
]


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    # Sizes that do not divide by two, so that pieces begin and end inside of parameters.
    return make_model(hidden_size=34, attention_heads=1, intermediate_size=51)  # type: ignore[no-any-return]


def name(shape: Shape) -> str:
    return "{}-{}-{}".format(*shape)


@pytest.fixture(scope="module")
def results(
    module_processes: Any, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("lora")
    found: dict[str, Any] = {}
    for world in (1, 2):
        jobs: list[dict[str, Any]] = [
            {"do": "train", "name": name(shape), "stage": shape[1], "dtype": shape[2], "lora": LORA}
            for shape in SHAPES
            if shape[0] == world
        ]
        if world == 2:
            common = {"stage": 3, "dtype": "float32"}
            jobs += [
                {"do": "train", "name": "kl", "lora": LORA, "kl": True, **common},
                {"do": "train", "name": "proximal", "lora": LORA, "proximal": True, **common},
                {
                    "do": "train",
                    "name": "proximal FSDP2",
                    "lora": LORA,
                    "proximal": True,
                    **common,
                    "stage": "FSDP2",
                },
                {"do": "train", "name": "some", "lora": (4, 8, ("v_proj",)), **common},
                {"do": "refused", "name": "rank", "lora": (8, 8, ()), "source": "1-1-float32", **common},
                {"do": "refused", "name": "alpha", "lora": (4, 4, ()), "source": "1-1-float32", **common},
            ]
        module_processes.run_ranks(
            "lora_worker.py", world, out=out, model=str(model), jobs=jobs, name=f"run-{world}"
        )
        found |= torch.load(out / f"run-{world}-0.pt", weights_only=False)
    return out, found


def plain(
    model: Path, targets: tuple[str, ...] = (), steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms and merged weights by plain autograd through ``W + scale · B A`` of a model without adapters."""
    whole = load_model(str(model), dtype="float32")
    adapted = load_model(str(model), dtype="float32")
    Adapters(adapted, Lora(*LORA[:2], targets))
    first = {n: p.detach().clone().requires_grad_() for n, p in adapted.named_parameters() if "lora_" in n}
    optimizer = torch.optim.AdamW(first.values(), lr=1.0, eps=float(SETTINGS["epsilon"]), weight_decay=0.01)
    base = dict(whole.named_parameters())

    def merged() -> dict[str, torch.Tensor]:
        weights = dict(base)
        for weight in base:
            layer = weight.removesuffix(".weight")
            if f"{layer}.lora_A" in first:
                change = first[f"{layer}.lora_B"] @ first[f"{layer}.lora_A"]
                weights[weight] = base[weight].detach() + LORA[1] / LORA[0] * change
        return weights

    norms = []
    for step in range(steps):
        batch = whole_batch(step)
        logprobs = []
        for sequence in batch["sequences"]:
            ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
            logits = torch.func.functional_call(whole, merged(), (ids,)).logits[0].float()
            every = (logits / SETTINGS["temperature"]).log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
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
        norm = torch.nn.utils.clip_grad_norm_(first.values(), SETTINGS["max_gradient_norm"])
        norms.append(float(norm))
        optimizer.param_groups[0]["lr"] = SETTINGS["learning_rate"] * min(1.0, (step + 1) / 2)
        optimizer.step()
    return norms, {n: w.detach() for n, w in merged().items()}


class TestTraining:
    @pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] == "float32"], ids=name)
    def test_gradient_norms_are_those_of_plain_autograd(
        self, shape: Shape, model: Path, results: Any
    ) -> None:
        expected, weights = plain(model)
        norms = [norm for _, norm, _ in results[1][name(shape)]["steps"]]
        assert norms[0] == pytest.approx(expected[0], rel=1e-6)
        assert norms[1:] == pytest.approx(expected[1:], rel=2e-5)  # after updates by AdamW
        for parameter, weight in results[1][name(shape)]["merged"].items():
            torch.testing.assert_close(weight, weights[parameter], rtol=1e-4, atol=1e-5, msg=parameter)

    def test_one_gradient_norm_at_every_stage(self, results: Any) -> None:
        first = {results[1][name(s)]["steps"][0][1] for s in SHAPES if s[2] == "float32"}
        assert max(first) == pytest.approx(min(first), rel=1e-6)

    @pytest.mark.parametrize("stage", [1, "FSDP2"])
    def test_bfloat16_trains_close_to_float32(self, stage: Stage, results: Any) -> None:
        half, full = (results[1][f"2-{stage}-{dtype}"]["steps"] for dtype in ("bfloat16", "float32"))
        assert [s[1] for s in half] == pytest.approx([s[1] for s in full], rel=0.1)

    def test_only_targets_change(self, model: Path, results: Any) -> None:
        base = dict(load_model(str(model), dtype="float32").named_parameters())
        merged = results[1]["some"]["merged"]
        changed = {n for n, w in merged.items() if not torch.equal(w, base[n].detach())}
        assert changed == {n for n in base if n.endswith("v_proj.weight")}

    def test_reference_is_the_model_without_adapters(self, results: Any) -> None:
        """B is zero before the first step, so the first KL is zero; then it grows."""
        divergences = [means["reference_kl"] for _, _, means in results[1]["kl"]["steps"]]
        assert divergences[0] == pytest.approx(0.0, abs=1e-7)
        assert divergences[2] > divergences[1] > 1e-6

    @pytest.mark.parametrize("job", ["proximal", "proximal FSDP2"])
    def test_proximal_policy_has_its_adapters(self, job: str, results: Any) -> None:
        saved = SavedState(results[0] / job)
        name = "model.layers.0.mlp.up_proj.lora_B"
        proximal, weight = torch.empty(51 * 4), torch.empty(51 * 4)
        saved.read(name, "proximal", 0, proximal)
        saved.read(name, "weight", 0, weight)
        assert proximal.abs().max() > 0
        assert not torch.equal(proximal, weight)


class TestCheckpoints:
    @pytest.mark.parametrize("job", [*map(name, SHAPES), "kl", "proximal", "proximal FSDP2"])
    def test_resumes_like_uninterrupted(self, job: str, results: Any) -> None:
        found = results[1][job]
        exact = "bfloat16" not in job
        assert found["resumed"] == pytest.approx(found["fourth"], rel=1e-6 if exact else 1e-2)
        for parameter, value in found["adapters"].items():
            torch.testing.assert_close(found["loaded"][parameter], value, rtol=0, atol=0)

    def test_has_adapters_only_and_their_settings(self, model: Path, results: Any) -> None:
        folder = results[0] / "2-3-float32"
        header = json.loads((folder / HEADER).read_text())
        assert header["lora"] == {"rank": 4, "alpha": 8, "targets": []}
        assert all(".lora_" in parameter for parameter in header["parameters"])
        count = sum(math.prod(shape) for shape in header["parameters"].values())
        size = sum(file.stat().st_size for file in folder.glob("rank-*.safetensors"))
        assert 12 * count < size < 13 * count + 20_000

    def test_adapters_of_another_rank_are_refused(self, results: Any) -> None:
        assert results[1]["rank"].endswith(
            "has adapters of rank 4, alpha 8, targetModules left out, and trainer.lora asks for adapters of rank 8, alpha 8, "
            "targetModules left out: restore trainer.lora, or start a new run"
        )
        assert "alpha 8" in results[1]["alpha"]
        assert "alpha 4" in results[1]["alpha"]

    def test_whole_weights_are_refused(self, results: Any) -> None:
        saved = SavedState(results[0] / "1-1-float32")
        with pytest.raises(Exception, match=r"trainer\.lora asks for whole weights"):
            saved.check(saved.header.parameters, None)


class TestLayers:
    def test_merged_weight_gives_the_layer_s_outputs(self) -> None:
        generator = torch.Generator().manual_seed(0)
        layer = torch.nn.Linear(12, 7)
        adapted = LoraLinear(layer, Lora(3, 6), generator)
        torch.nn.init.normal_(adapted.lora_B, generator=generator)
        inputs = torch.randn(5, 12, generator=generator)
        merged = torch.nn.functional.linear(inputs, adapted.merged(torch.float32), layer.bias)
        torch.testing.assert_close(adapted(inputs), merged, rtol=1e-5, atol=1e-6)
        adapted.active = False
        torch.testing.assert_close(adapted(inputs), layer(inputs), rtol=0, atol=0)

    def test_output_embedding_is_no_target(self, model: Path) -> None:
        causal_lm = load_model(str(model), dtype="float32")
        Adapters(causal_lm, Lora(2, 2))
        assert type(causal_lm.lm_head) is torch.nn.Linear
        assert {n.rpartition(".")[2] for n, p in causal_lm.named_parameters() if p.requires_grad} == {
            "lora_A",
            "lora_B",
        }

    @pytest.mark.parametrize("target", ["query", "lm_head", "proj", "v_proj.weight", "layers.0"])
    def test_target_that_matches_nothing_is_refused(self, target: str, model: Path) -> None:
        causal_lm = load_model(str(model), dtype="float32")
        with pytest.raises(
            ModelError, match=f"{target}' names no linear layer of llama; there are down_proj,"
        ):
            Adapters(causal_lm, Lora(2, 2, ("v_proj", target)))

    def test_preparation_refuses_such_a_target(self, model: Path) -> None:
        assert problems(model, "float32", "sdpa", ["v_proj"]) == problems(model, "float32", "sdpa", []) == []
        (problem,) = problems(model, "float32", "sdpa", ["query"])
        assert problem.startswith(
            "trainer.lora.targetModules: 'query' names no linear layer of llama; there are down_proj"
        )

    def test_layers_on_the_meta_device_get_real_adapters(self, model: Path) -> None:
        from scalerl_trainer.models.checkpoint_names import skeleton

        causal_lm = skeleton(model)
        Adapters(causal_lm, Lora(2, 2, ("v_proj",)))
        layer = causal_lm.model.layers[0].self_attn.v_proj
        assert (layer.weight.device.type, layer.lora_A.device.type) == ("meta", "cpu")
        assert layer.lora_A.abs().max() > 0


def with_peft(
    model: Path, adapters: dict[str, torch.Tensor], folder: Path, ids: torch.Tensor
) -> torch.Tensor:
    """Logits of peft's model with these adapters, from its file format."""
    peft = pytest.importorskip("peft", reason="needs peft, which is no dependency")
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in adapters.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(Lora(*LORA), adapters, str(model))))
    loaded = peft.PeftModel.from_pretrained(load_model(str(model), dtype="float32"), folder)
    with torch.no_grad():
        return loaded.eval()(ids).logits  # type: ignore[no-any-return]


class TestPeft:
    def test_names_and_config_are_peft_s(self, results: Any, model: Path) -> None:
        names = [n for n, _ in results[1]["1-1-float32"]["shapes"]]
        assert names[:2] == [
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        ]
        assert list(results[1]["2-3-float32"]["adapters"]) == names
        assert peft_name("a.lora_A") == "base_model.model.a.lora_A.weight"
        config = adapter_config(Lora(*LORA), names, "base")
        assert config["target_modules"] == [
            *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
        ]
        assert {k: config[k] for k in ("peft_type", "r", "lora_alpha", "base_model_name_or_path")} == {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "base_model_name_or_path": "base",
        }

    def test_peft_computes_the_same(self, results: Any, model: Path, tmp_path: Path) -> None:
        found = results[1]["2-3-float32"]
        ids = torch.arange(3, 15)[None]
        theirs = with_peft(model, found["adapters"], tmp_path, ids)
        ours = load_model(str(model), dtype="float32").eval()
        ours.load_state_dict(found["merged"], strict=False)
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs, rtol=1e-5, atol=1e-5)
