"""Checkpoints load on other numbers of ranks, at other ZeRO stages in the other engine, and with or without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines_and_stages import Stage

from scalerl_trainer.checkpoints.engine_files import KEYS, PROXIMAL, SavedState

pytestmark = pytest.mark.slow

Shape = tuple[int, Stage, str]
"""Ranks, stage, dtype."""

SHAPES: list[Shape] = [(world, stage, "float32") for world in (1, 2) for stage in (*range(4), "FSDP2")]
HALF: list[Shape] = [(world, stage, "bfloat16") for world in (1, 2) for stage in (1, 2, 3, "FSDP2")]


def name(shape: Shape) -> str:
    return "{}-ranks-zero-{}-{}".format(*shape)


def on(source: Shape, target: Shape) -> str:
    return f"{name(source)}-on-{name(target)}"


def pairs() -> list[Any]:
    """Shapes that save and that load: those to try first, and the others."""
    first = [(SHAPES[(i + 3) % 10], target) for i, target in enumerate(SHAPES)]
    first += [(HALF[6], HALF[0]), (HALF[7], HALF[2]), (HALF[0], HALF[7])]
    first += [((2, "FSDP2 offload", "bfloat16"), (2, "3 offload", "bfloat16"))]
    first += [((2, "3 offload", "float32"), (1, 1, "float32")), (SHAPES[9], (1, "3 offload", "float32"))]
    others = [(source, target) for source in SHAPES for target in SHAPES if source != target]
    others += [(source, target) for source in HALF for target in HALF if source != target]
    others += [(SHAPES[8], HALF[1]), (HALF[4], SHAPES[0])]
    return [
        pytest.param(
            *pair, id=f"{name(pair[0])}-on-{name(pair[1])}", marks=[] if pair in first else [pytest.mark.full]
        )
        for pair in dict.fromkeys([*first, *others])
    ]


class Ranks:
    """Runs jobs on 1 or 2 ranks, one process a rank."""

    def __init__(self, processes: Any, model: Path, out: Path) -> None:
        self._processes, self._model, self.out = processes, model, out
        self.results: dict[str, Any] = {}
        self._runs = 0

    def run(self, world: int, jobs: list[dict[str, Any]]) -> None:
        self._runs += 1
        name = f"run{self._runs}"
        given = {"out": self.out, "model": str(self._model), "jobs": jobs, "name": name}
        self._processes.run_ranks("reshape_worker.py", world, **given)
        self.results |= torch.load(self.out / f"{name}-0.pt", weights_only=False)


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    # Sizes that do not divide by two: pieces begin and end inside of parameters, and the last rank's are padded.
    return make_model(hidden_size=34, attention_heads=1, intermediate_size=51)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest,
    module_processes: Any,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Ranks:
    """Only the jobs of the selected tests."""
    selected = [i.callspec.params for i in request.session.items if i.path == request.path]
    wanted = dict.fromkeys((p["source"], p["target"]) for p in selected if "source" in p)
    saves: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    loads: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for shape in dict.fromkeys(shape for pair in wanted for shape in pair):
        saves[shape[0]].append({"do": "save", "name": name(shape), "shape": shape})
    for source, target in wanted:
        job = {"do": "load", "name": on(source, target), "source": name(source), "shape": target}
        loads[target[0]].append(job)
    ranks = Ranks(module_processes, model, tmp_path_factory.mktemp("saved"))
    ranks.run(1, saves[1])
    ranks.run(2, [*saves[2], *loads[2]])
    ranks.run(1, loads[1])
    return ranks


def whole(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of all parameters, and the proximal policy's weights where there are any."""
    saved = SavedState(directory)
    found = {"steps": torch.tensor(saved.header.optimizer_steps)}
    for parameter, shape in saved.header.parameters.items():
        for key in (*KEYS, *([PROXIMAL] if saved.has(PROXIMAL) else [])):
            found[f"{parameter}/{key}"] = torch.empty(torch.Size(shape).numel())
            saved.read(parameter, key, 0, found[f"{parameter}/{key}"])
    return found


@pytest.mark.parametrize(("source", "target"), pairs())
class TestEveryShapeLoadsEveryOther:
    def test_reshape_is_bit_exact(self, source: Shape, target: Shape, ranks: Ranks) -> None:
        """A second save after the load equals the first."""
        before = whole(ranks.out / name(source))
        after = whole(ranks.out / on(source, target))
        assert before.keys() == after.keys()
        assert any(key.endswith(PROXIMAL) for key in before)
        for key, value in before.items():
            expected = value.to(getattr(torch, target[2])).float() if key.endswith(PROXIMAL) else value
            torch.testing.assert_close(after[key], expected, rtol=0, atol=0, msg=key)

    def test_reshape_restores_model_weights(self, source: Shape, target: Shape, ranks: Ranks) -> None:
        saved = whole(ranks.out / name(source))
        loaded = ranks.results[on(source, target)]["loaded"]
        for parameter, weights in loaded.items():
            expected = saved[f"{parameter}/weight"].view(weights.shape).to(getattr(torch, target[2])).float()
            torch.testing.assert_close(weights, expected, rtol=0, atol=0, msg=parameter)

    def test_reshape_resumes_like_uninterrupted_run(self, source: Shape, target: Shape, ranks: Ranks) -> None:
        got = ranks.results[on(source, target)]
        straight = ranks.results[name(target)]
        assert got["steps_done"] == straight["steps_done"] == 3
        exact = source[2] == target[2] == "float32"
        assert got["after"] == pytest.approx(
            straight["after"], rel=2e-5 if exact else 0.1, abs=0 if exact else 0.02
        )
        if not exact:
            return  # AdamW turns the last bit of a small gradient into a whole step
        for parameter, expected in straight["parameters"].items():
            torch.testing.assert_close(
                got["parameters"][parameter], expected, rtol=1e-4, atol=2e-5, msg=parameter
            )
