"""What the values of a choice imply: the tables have every value, and the rules of the spec accept what they say."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from scalerl_api.edits import EDITS
from scalerl_api.engines import ENGINES, EngineName, Offload
from scalerl_api.load import SpecError, data_paths, run_from_object
from scalerl_api.memory.trainer_rank import stage_plan
from scalerl_api.plugins import PluginSpec
from scalerl_api.recipe.loss import LossKind, LossSpec
from scalerl_api.source import SOURCES, SourcesSpec
from scalerl_api.source_kind import SourceKind
from scalerl_api.spec import RunSpec
from scalerl_api.weight_backends import WEIGHT_BACKENDS, BackendName, weight_backend

BASE: dict[str, Any] = {
    "model": {"scratch": {}},
    "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
    "budget": {"maxSteps": 1},
}


def run_spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate(BASE | sections, by_alias=True, by_name=False)


def model_of(annotation: Any) -> Any:
    return next(one for one in (annotation, *get_args(annotation)) if isinstance(one, type))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", get_args(EngineName))
def test_rules_accept_what_an_engine_takes(engine: EngineName, dtype: Any) -> None:
    implied = ENGINES[engine]
    for stage, offload in itertools.product(range(4), get_args(Offload)):
        takes = stage in implied.zero_stages(offload, dtype) and offload in ("None", *implied.offloads)
        trainer = {"engine": engine, "zeroStage": stage, "offload": offload, "devices": 1}
        try:
            spec = run_spec(trainer=trainer, model={"scratch": {}, "dtype": dtype})
        except ValidationError:
            assert not takes, (stage, offload)
        else:
            assert takes, (stage, offload)
            assert spec.trainer.engine == engine


def test_every_weight_backend() -> None:
    assert {*WEIGHT_BACKENDS, "Auto"} == set(get_args(BackendName))
    assert weight_backend("Auto", on_devices=True) is WEIGHT_BACKENDS["NCCL"]
    assert weight_backend("Auto", on_devices=False) is WEIGHT_BACKENDS["Gloo"]
    assert weight_backend("Files", on_devices=True).group is None


ON_GPUS: dict[str, Any] = {"generator": {"devices": 1}, "trainer": {"devices": 1}}


@pytest.mark.parametrize(
    ("sections", "mebibytes"),
    [
        ({}, 16),
        ({"weightSync": {"bucket": "64Mi"}}, 64),
        (ON_GPUS | {"weightSync": {"backend": "Gloo"}}, 16),
        (ON_GPUS | {"weightSync": {"backend": "Files"}}, 16),
        (ON_GPUS, 409),  # a tenth of 16 GiB is left by vLLM; four buckets
        (ON_GPUS | {"generator": {"devices": 1, "deviceMemory": "80Gi"}}, 512),
        (ON_GPUS | {"generator": {"devices": 1, "deviceMemory": "80Gi", "memoryFraction": "0.99"}}, 204),
        (ON_GPUS | {"generator": {"devices": 1, "memoryFraction": "1"}}, 16),
        (ON_GPUS | {"weightSync": {"bucket": "16Mi"}}, 16),
        (ON_GPUS | {"weightSync": {"bucket": "1Gi"}}, 1024),
    ],
)
def test_size_of_a_bucket_is_the_backends_unless_given(sections: dict[str, Any], mebibytes: int) -> None:
    assert run_spec(**sections).publish_bucket_bytes == mebibytes << 20


def test_every_source_is_a_kind_and_cannot_change() -> None:
    assert SOURCES == ("reasoningGym", "jsonl", "dataset", "plugin")
    for name, field in SourcesSpec.model_fields.items():
        assert issubclass(model_of(field.annotation), SourceKind), name
        assert f"task.{field.alias}" in EDITS


def test_every_loss_is_a_kind_or_of_a_package() -> None:
    for name, field in LossSpec.model_fields.items():
        assert issubclass(model_of(field.annotation), LossKind | PluginSpec), name


def test_paths_of_all_sources() -> None:
    """Those of the warm start too: on a cluster they are in a volume, like the tasks'."""
    held_out = {"jsonl": {"path": "/a.jsonl"}, "verifier": {"name": "exact"}}
    spec = run_spec(
        task={"dataset": {"files": ["/a.csv", "/b.csv"]}, "verifier": {"name": "exact"}},
        evaluation={"sets": [{"name": "a", "task": held_out}]},
        warmStart={"steps": 1, "jsonl": {"path": "w.jsonl"}},
    )
    assert data_paths(spec) == {
        "spec.task.dataset.files[0]": "/a.csv",
        "spec.task.dataset.files[1]": "/b.csv",
        "spec.evaluation.sets.0.task.jsonl.path": "/a.jsonl",
        "spec.warmStart.jsonl.path": "w.jsonl",
    }
    assert spec.has_dataset
    manifest = {"apiVersion": "scalerl.dev/v1alpha1", "kind": "ScaleRLRun", "metadata": {"name": "a"}}
    with pytest.raises(SpecError, match=r"spec\.warmStart\.jsonl\.path: must be absolute on a cluster"):
        run_from_object(manifest | {"spec": spec.model_dump(by_alias=True, exclude_none=True, mode="json")})


def test_stages_of_the_plan_are_those_of_the_engine() -> None:
    from scalerl_api.memory.model_size import ModelSize

    size = ModelSize(10**6, 64, 2, 128, 1000)
    assert list(stage_plan(size, run_spec(trainer={"engine": "FSDP2", "zeroStage": 3}))) == [3]
    assert list(stage_plan(size, run_spec())) == [1, 2, 3]
