"""What FSDP2 refuses, and how it divides a model; ``test_trainer_engine.py`` and its neighbours train with it."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny_models
import torch
from free_port import free_port
from torch.distributed.fsdp import FSDPModule

from scalerl_api.engines import ENGINES, EngineName, Offload
from scalerl_api.memory.model_size import Dtype
from scalerl_trainer.engine.backend import open_backend, open_frozen
from scalerl_trainer.engine.fsdp_backend import check_unreached, units
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.errors import EngineError, ModelError
from scalerl_trainer.models import load_model
from scalerl_trainer.models.policy import Policy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(tiny_models.FAMILIES))
def test_units_are_the_layers(name: str, tmp_path: Path) -> None:
    model = load_model(str(tiny_models.write(name, tmp_path / name)), dtype="float32")
    found = units(Policy(model, fp32_head=True))
    assert len(found) == model.config.num_hidden_layers
    inside = {parameter for unit in found for parameter in unit.parameters()}
    outside = {n for n, p in model.named_parameters() if p not in inside}
    assert len(outside) <= 4, outside


def test_layers_that_share_parameters_are_refused() -> None:
    """Each would get a copy of its own."""
    layer = torch.nn.Linear(4, 4)
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList([torch.nn.Sequential(layer), torch.nn.Sequential(layer)])
    with pytest.raises(ModelError, match=r"share parameters, .* set trainer\.engine: DeepSpeed"):
        units(module)


def test_parameter_without_dimensions_is_refused() -> None:
    module = torch.nn.Module()
    module.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ModelError, match="scale has no dimension"):
        units(module)


@pytest.mark.parametrize("stage", range(3))
def test_stages_that_leave_state_whole_are_refused(stage: int) -> None:
    with pytest.raises(EngineError, match=f"FSDP2 partitions all state.*not {stage}"):
        EngineSettings(engine="FSDP2", zero_stage=stage, dtype="float32")


def test_offload_that_no_engine_has_is_refused() -> None:
    with pytest.raises(EngineError, match="offload needs ZeRO stage 3, not 1"):
        EngineSettings(offload="Optimizer")
    with pytest.raises(EngineError, match="FSDP2 does not offload Optimizer: choose OptimizerAndParameters"):
        EngineSettings(engine="FSDP2", zero_stage=3, offload="Optimizer")


def test_experts_of_their_own_need_torch_that_reduces_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 would wait for a rank whose tokens chose other experts."""
    experts = torch.nn.Module()
    experts.layers = torch.nn.ModuleList([torch.nn.Module()])
    experts.layers[0].experts = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    fused = torch.nn.Module()
    fused.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    check_unreached(experts)
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    check_unreached(fused)
    with pytest.raises(
        ModelError, match=r"layers\.0\.experts .* torch 2\.13 .* set trainer\.engine: DeepSpeed"
    ):
        check_unreached(experts)


def test_deepspeed_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for opening in (open_backend, open_frozen):
        arguments: Any = (torch.nn.Linear(2, 2), EngineSettings(), torch.device("cpu"))
        with pytest.raises(EngineError, match=r"needs the package deepspeed .* or set FSDP2"):
            opening(*arguments)


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("engine", get_args(EngineName))
def test_settings_take_what_the_spec_does(engine: EngineName, dtype: Dtype) -> None:
    implied = ENGINES[engine]
    for stage, offload in itertools.product(range(4), get_args(Offload)):
        takes = stage in implied.zero_stages(offload, dtype) and offload in ("None", *implied.offloads)
        with nullcontext() if takes else pytest.raises(EngineError):
            EngineSettings(engine=engine, zero_stage=stage, offload=offload, dtype=dtype)


@pytest.mark.full
def test_engines_agree_on_every_family(tmp_path: Path, processes: Any) -> None:
    folders = {name: tiny_models.write(name, tmp_path / name) for name in sorted(tiny_models.FAMILIES)}
    port, pipes = free_port(), []
    for rank in range(2):
        ours, theirs = multiprocessing.Pipe()
        given = {"pipe": theirs, "rank": rank, "port": port, "folders": folders}
        processes.run("fsdp_worker.py", FAMILIES=given)
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.poll(240)
        for name, (deepspeed, fsdp) in pipe.recv().items():
            assert fsdp == pytest.approx(deepspeed, rel=2e-6), name
