"""For an edit of every field that restarts the trainer: the real loader resumes from an earlier checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spec_edits import BASE, Edited, base, edits, entry_edits
from spec_reads import reads

import scalerl_trainer
from scalerl_api.edits import Effect, edit_of
from scalerl_api.model_source import ScratchExperts
from scalerl_trainer.engine.settings import engine_settings
from scalerl_trainer.models import write_scratch

pytestmark = pytest.mark.slow

TAKEN = [*edits(refused=False), *entry_edits(refused=False)]
READ = [edited for edited in TAKEN if "trainer" in edited.edit.effect.roles]


def engine_of(edited: Edited) -> Any:
    spec = edited.run.spec
    return spec.trainer.replicas, engine_settings(spec)


LOADED = {engine_of(edited): edited for edited in reversed(READ)}
"""One of the edits that give the same engine."""


@pytest.fixture(scope="module")
def results(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a step on the base's checkpoint, by field."""
    root = tmp_path_factory.mktemp("edits")
    model = root / "model"
    model.mkdir()
    spec = base().spec.model
    assert spec.scratch is not None
    # A mixture of experts, for trainer.routerReplay.
    scratch = spec.scratch.model_copy(update={"experts": ScratchExperts(count=2, per_token=1)})
    texts = ["1 + 1 = 2"] * 9
    write_scratch(model, scratch, texts, seed=3, dtype=spec.dtype, context_tokens=spec.context_tokens)

    def run(world: int, runs: dict[str, Any]) -> dict[str, Any]:
        given = {"model": str(model), "root": root, "runs": runs, "out": root / "out"}
        module_processes.run_ranks("edits_worker.py", world, **given)
        return dict(torch.load(root / "out", weights_only=False))

    found = run(1, {"base": BASE})
    for world in sorted({world for world, *_ in LOADED}):
        found |= run(world, {e.path: e.manifest for key, e in LOADED.items() if key[0] == world})
    return found


@pytest.mark.parametrize("edited", READ, ids=str)
def test_edited_run_resumes_from_checkpoint(results: dict[str, Any], edited: Edited) -> None:
    assert results["base"]["version"] is None
    found = results[LOADED[engine_of(edited)].path]
    assert (found["version"], found["steps"]) == (1, 1)
    assert found["stage"] == edited.run.spec.trainer.zero_stage
    assert found["engine"] == edited.run.spec.trainer.engine
    assert found["rate"] == pytest.approx(found["expected_rate"])
    assert found["used"] == found["expected"], (
        "the optimizer's numbers are those of the spec, not the checkpoint's"
    )


BEFORE_THE_RUN = {"prepare.py", "checks.py", "model_checks.py", "tokenizer_checks.py", "fork.py"}
"""Of the Job before the run, with the fields that repeat it in :data:`scalerl_api.edits.EDITS`, and of a run without a checkpoint."""
SOURCES = sorted(
    path for path in Path(scalerl_trainer.__file__).parent.rglob("*.py") if path.name not in BEFORE_THE_RUN
)
ANNOTATED = {
    *(
        "MidTraining",
        "load_reference",
        "solved_pairs",
        "of_source",
        "held_out_examples",
        "Pairs",
        "supervised_tokens",
        "rank_batch",
        "_by_turn",
        "make_loss",
        "_loss",
        "_corrected",
        "Exporter",
        "Worker",
        "stage_model",
        "_whole_step",
        "weights_to_publish",
        "check_device_memory",
    ),
    *(
        "engine_settings",
        "collective_timeout_seconds",
        "publish_settings",
        "make_publisher",
        "first_probes",
        "publish_limit_seconds",
        "exported_config",
        "exports_adapter",
        "_saved_tensors",
        "Lora.of",
        "write_model",
        "open_tasks",
        "trainer_rank_memory",
        "open_warm_start",
        "of_run",
    ),
    *("_open_engine", "_load_checkpoint", "_train_supervised", "_set_reference"),
}
"""Functions whose annotations name the part of the spec that they read, or that this test sees in their own file; of the last three the
trainer uses the data, which cannot change, and an estimate of memory is of the spec with which the trainer started."""
READ_AGAIN = {"autoscaling.mode"}
"""By the leader, before each checkpoint."""
NOT_READ = {
    "object_store_folders.py": {
        *(f"task.verifier.{name}" for name in ("memory", "timeoutSeconds", "workers")),
        *(f"task.environment.{name}" for name in ("memory", "turnTimeoutSeconds", "workers")),
    }
}
"""By file: fields of the tasks that ``RunSpec.has_dataset`` does not read, though it goes through all tasks."""


def test_reads_finds_spec_fields() -> None:
    found = set().union(*(reads(source, ANNOTATED) for source in SOURCES))
    assert found >= {
        *("checkpoint.everySteps", "checkpoint.keep", "trainer.export.to", "trainer.zeroStage"),
        *("recipe.optimizer.beta1", "recipe.aggregation", "recipe.loss.cispo.ratioCap", "weightSync.backend"),
        *("trainer.microBatchTokens", "generator.devices", "model.attention", "autoscaling.mode"),
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_trainer_reads_only_fields_that_restart_it(source: Path) -> None:
    """Or reads again before each use."""
    for path in reads(source, ANNOTATED) - READ_AGAIN - NOT_READ.get(source.name, set()):
        effect = edit_of(path).effect
        assert effect is Effect.REFUSED or "trainer" in effect.roles, f"{source.name} reads spec.{path}"
