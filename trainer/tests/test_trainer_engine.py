"""Two real ranks under DeepSpeed against one process of plain torch, on a PATH without any compiler."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_and_stages import COPIED, SKIPPED, Stage
from free_port import free_port

from scalerl_trainer.engine.gradient_norms import kind_of
from scalerl_trainer.models import load_model

WORKER = Path(__file__).with_name("engine_worker.py")
RANKS = 2
OFFLOADED: list[Stage] = ["3 optimizer", "3 offload", "FSDP2 offload"]
RUNS = [f"train {stage}" for stage in (*range(4), "FSDP2", *OFFLOADED)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(make_model: Any) -> str:
    return str(make_model(hidden_size=32, attention_heads=2, intermediate_size=48))


def run_ranks(model: str, out: Path, world: int, timeout: float = 300) -> list[dict[str, Any]]:
    port = free_port()
    nothing = out / "empty-path"
    nothing.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CUDA_HOME")
    }
    environment |= {
        "PATH": str(nothing),
        "TORCH_EXTENSIONS_DIR": str(out / "extensions"),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    logs = [out / f"rank-{rank}.log" for rank in range(world)]
    processes = []
    for rank in range(world):
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), model, str(out)],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    results = run_ranks(model, out, RANKS)
    assert not (out / "extensions").exists(), "DeepSpeed compiled something"
    return results


@pytest.fixture(scope="module")
def worker() -> Any:
    """The worker's module, which imports DeepSpeed."""
    sys.path.insert(0, str(WORKER.parent))
    try:
        import engine_worker
    finally:
        sys.path.pop(0)
    return engine_worker


def plain_logprobs(network: Any, sequence: Any, temperature: float) -> torch.Tensor:
    """Of the trainable tokens of one sequence, with the library's own logits."""
    ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
    logits = network(ids).logits[0, len(sequence.prompt) - 1 : -1].float() / temperature
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(sequence.completion)[:, None])[:, 0]
    return chosen[torch.tensor(sequence.trainable)]


@pytest.fixture(scope="module")
def reference(model: str, worker: Any) -> dict[str, Any]:
    """Sequence by sequence, unpacked, with the library's own logits, torch's AdamW and the formula of CISPO."""
    settings, whole_batch = worker.SETTINGS, worker.whole_batch
    temperature = settings["temperature"]
    network = load_model(model, dtype="float32")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, eps=1e-8, weight_decay=0.01)
    losses, norms, by_kind = [], [], []

    for step in range(worker.STEPS):
        batch = whole_batch(step)
        total = torch.zeros(())
        for i, sequence in enumerate(batch["sequences"]):
            own = plain_logprobs(network, sequence, temperature)
            ratio = (own.detach() - batch["generator"][i]).exp().clamp(max=5.0)
            total = total - (batch["weights"][i] * batch["advantages"][i] * ratio * own).sum()
        optimizer.zero_grad()
        total.backward()
        squares = dict.fromkeys(map(kind_of, dict(network.named_parameters())), 0.0)
        for name, parameter in network.named_parameters():
            squares[kind_of(name)] += float(parameter.grad.square().sum())  # type: ignore[union-attr]
        by_kind.append({kind: math.sqrt(square) for kind, square in squares.items()})
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(network.parameters(), settings["max_gradient_norm"]))
        )
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, (step + 1) / settings["warmup_steps"])
        optimizer.step()
        losses.append(total.item())
    with torch.no_grad():
        final = torch.cat([plain_logprobs(network, s, temperature) for s in whole_batch(0)["sequences"]])
    return {
        "losses": losses,
        "norms": norms,
        "by_kind": by_kind,
        "parameters": {name: p.detach() for name, p in network.named_parameters()},
        "logprobs": final,
    }


def test_deepspeeds_collectives_have_time_out_of_process_group(
    ranks: list[dict[str, Any]], worker: Any
) -> None:
    """They are in a group of DeepSpeed's own, which has torch's default otherwise."""
    assert [rank["timeout"].total_seconds() for rank in ranks] == [worker.TIMEOUT_SECONDS] * RANKS


def test_engine_needs_no_compiler(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["compilers"] == []


@pytest.mark.parametrize("run", [*RUNS, "checkpointed 3", "checkpointed FSDP2"])
def test_step_on_two_ranks_matches_plain_torch(
    run: str, ranks: list[dict[str, Any]], reference: dict[str, Any]
) -> None:
    got = ranks[0][run]
    assert [s.loss for s in got["stats"]] == pytest.approx(reference["losses"], rel=1e-4)
    assert [s.gradient_norm for s in got["stats"]] == pytest.approx(reference["norms"], rel=1e-4)
    for stats, expected in zip(got["stats"], reference["by_kind"], strict=True):
        assert stats.gradient_norms == pytest.approx(expected, rel=1e-4)
    assert min(reference["norms"]) > 0.05, "the clip must be active"
    assert got["parameters"].keys() == reference["parameters"].keys()
    for name, expected in reference["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], expected, rtol=1e-4, atol=2e-5, msg=name)
    torch.testing.assert_close(got["logprobs"].logprobs_n, reference["logprobs"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("run", RUNS)
def test_exported_model_has_same_logprobs(run: str, ranks: list[dict[str, Any]], worker: Any) -> None:
    from transformers import AutoModelForCausalLM

    got = ranks[0][run]
    exported = AutoModelForCausalLM.from_pretrained(got["exported"])
    with torch.no_grad():
        expected = torch.cat(
            [
                plain_logprobs(exported, s, worker.SETTINGS["temperature"])
                for s in worker.whole_batch(0)["sequences"]
            ]
        )
    torch.testing.assert_close(got["logprobs"].logprobs_n, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_resumed_engine_takes_same_step(run: str, ranks: list[dict[str, Any]]) -> None:
    got = ranks[0][run]
    assert got["resumed_steps"] == 3
    for name, expected in got["parameters"].items():
        torch.testing.assert_close(got["resumed"][name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3, "FSDP2", *OFFLOADED])
def test_bfloat16_is_close_to_float32(
    stage: Stage, ranks: list[dict[str, Any]], reference: dict[str, Any]
) -> None:
    got = ranks[0][f"bfloat16 {stage}"]
    assert [s.loss for s in got["stats"]] == pytest.approx(reference["losses"], rel=0.1, abs=0.02)
    assert [s.gradient_norm for s in got["stats"]] == pytest.approx(reference["norms"], rel=0.1)
    for stats, expected in zip(got["stats"], reference["by_kind"], strict=True):
        assert stats.gradient_norms == pytest.approx(expected, rel=0.1)
    for name, expected in got["parameters"].items():
        torch.testing.assert_close(got["resumed"][name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "FSDP2", *OFFLOADED])
def test_gradients_are_reduced_in_float32_and_zero_disables_clipping(
    stage: Stage, ranks: list[dict[str, Any]]
) -> None:
    """In bfloat16 the smaller contributions would be rounded away: .5 or .500244."""
    mean = (1 + 2**-9 + 2**-11 + 2**-13) / 2
    for rank in ranks:
        gradients, norm, _ = rank[f"reduced {stage}"]
        assert gradients == pytest.approx([mean], abs=2e-6)
        assert norm == pytest.approx(mean * 129**0.5, rel=1e-5), "far beyond 1"


@pytest.mark.parametrize(("stage", "reductions"), [(0, 1), (1, 1), (2, 2)])
def test_gradients_are_reduced_once_a_step_below_zero_2(
    stage: Stage, reductions: int, ranks: list[dict[str, Any]]
) -> None:
    """Of a step of two micro-batches: where a rank has whole gradients, they are accumulated before they are reduced."""
    for rank in ranks:
        *_, values = rank[f"reduced {stage}"]
        assert values // 129 == reductions


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "FSDP2", *OFFLOADED])
def test_gradient_of_a_parameter_that_no_pass_reaches_is_not_applied_again(
    stage: Stage, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank[f"unreached {stage}"] == pytest.approx([128**0.5, 8.0, 320**0.5, 320**0.5, 8.0], rel=1e-5)


@pytest.mark.parametrize("stage", range(3))
def test_prompts_computed_once_on_one_rank_alone_change_no_update(
    stage: Stage, ranks: list[dict[str, Any]]
) -> None:
    found = ranks[0][f"unlike {stage}"]
    for name, whole in found["whole"].items():
        torch.testing.assert_close(found["shared"][name], whole, rtol=1e-4, atol=1e-5, msg=name)


def test_engines_agree_in_bfloat16(ranks: list[dict[str, Any]]) -> None:
    ours, theirs = (ranks[0][f"bfloat16 {stage}"]["stats"] for stage in ("FSDP2", 3))
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-3)


def test_step_stats_are_equal_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["train 3"]["stats"][0] for rank in ranks)
    assert first.trainable_tokens == second.trainable_tokens == 35
    assert (first.loss, first.entropy, first.ratios) == (second.loss, second.entropy, second.ratios)
    assert first.sequences == 7
    assert first.ratios.tokens == 35
    assert sum(p.tokens for p in first.fresh_ratios_by_position) == 9 + 1 + 6 + 8
    assert first.loss_means["truncated"] == pytest.approx(round(first.loss_means["truncated"] * 35) / 35)
    assert set(first.seconds) == {"pack", "compute", "wait", "copy", "update", "total"}
    assert [rank["train 3"]["stats"][0].learning_rate for rank in ranks] == [5e-3, 5e-3]


def test_differences_are_of_each_token(ranks: list[dict[str, Any]], model: str, worker: Any) -> None:
    """In the order of the rank's sequences, over all micro-batches."""
    network, batch = load_model(model, dtype="float32"), worker.whole_batch(0)
    for rank, mine in enumerate([[0, 2, 3, 4, 5], [1, 6]]):
        with torch.no_grad():
            own = [
                plain_logprobs(network, batch["sequences"][i], worker.SETTINGS["temperature"]) for i in mine
            ]
        expected = torch.cat([one - batch["generator"][i] for one, i in zip(own, mine, strict=True)])
        found = ranks[rank]["train 3"]["stats"][0].differences_n
        torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=0)


def test_gather_parameters_is_empty_on_other_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["train 3"]["parameters"] == {}


@pytest.mark.parametrize("stage", [0, 1, 3, "FSDP2"])
class TestRefusals:
    def test_bad_shard_raises_on_all_ranks(self, stage: Stage, ranks: list[dict[str, Any]]) -> None:
        first, second = (rank[f"refuse {stage}"] for rank in ranks)
        assert second["nan generator"].startswith("NonFiniteLogprobError: ")
        assert (
            first["nan generator"] == "BadBatchError: the shard of rank 1 cannot be trained on; see its log"
        )
        assert second["too long"].startswith(
            "SequenceTooLongError: sequence 0 has 40 tokens, but a micro-batch holds 24"
        )
        assert first["too long"].startswith("BadBatchError: the shard of rank 1")
        assert second["strange"].startswith("BadBatchError: token id 517 is outside the model's vocabulary")
        assert first["strange"].startswith("BadBatchError: the shard of rank 1")
        assert first["usable after bad batches"]

    def test_empty_batch_is_not_applied(self, stage: Stage, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            stats = rank[f"refuse {stage}"]["empty"]
            assert (stats.applied, stats.loss, stats.gradient_norm, stats.trainable_tokens) == (
                False,
                0.0,
                0.0,
                0,
            )


@pytest.mark.parametrize(("stage", "dtype"), SKIPPED)
def test_skipped_step_changes_nothing_on_any_rank(
    stage: Stage, dtype: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        found = rank[f"skip {stage} {dtype}"]
        assert found["gradient"].skipped in ("the gradient norm is nan", "the gradient norm is inf")
        assert found["gradient not clipped"].skipped.startswith("the gradient norm is ")
        assert found["loss"].skipped == "the loss is nan"
        assert found["ratio"].skipped == (
            "100.0 % of tokens have a ratio beyond 10 between trainer and generator, 10 % are allowed"
        )
        for name in ("gradient", "loss", "ratio"):
            assert (found[name].applied, found[name].step) == (False, 1)
            assert found[f"{name} unchanged"], name
        assert (found["after"].applied, found["after"].step) == (True, 1)
        assert found["continues"], "the next step is the one that would have been taken, optimizer included"
        assert found["outlier"].applied, "one broken token ends no step"
        assert found["outlier"].ratios.ratio_mean > 1e9
    first, second = (rank[f"skip {stage} {dtype}"]["ratio"].broken for rank in ranks)
    assert (sum(first.values()), sum(second.values())) == (23, 12), "each rank names its own sequences"
    assert set(second) == {0, 1}


def test_warm_start_learns_and_resets_optimizer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        warm = rank["warm"]
        assert warm["losses"][0] > 2.5, "it began near uniform over the vocabulary"
        assert warm["result"][2] < 0.8
        assert warm["stopped"][3] >= 0.5
        assert 32 <= warm["stopped"][0] < 200
        assert warm["clean"]
        assert warm["steps_done"] == 0
    assert ranks[0]["warm"]["losses"] == ranks[1]["warm"]["losses"]


@pytest.mark.parametrize("stage", range(3))
def test_weights_read_beside_a_step_are_those_before_its_update(
    ranks: list[dict[str, Any]], stage: Stage
) -> None:
    """Bit for bit; without the wait they are a mix of two versions, so the step did run beside."""
    whole, mixed = (ranks[0][f"beside {stage} {waits}"] for waits in (True, False))
    for read in (whole, mixed):
        assert read["applied"]
        assert read["before"].keys() == read["found"].keys()
        assert not all(torch.equal(read["before"][n], read["after"][n]) for n in read["before"])
    assert all(torch.equal(tensor, whole["before"][n]) for n, tensor in whole["found"].items())
    assert not all(torch.equal(tensor, mixed["before"][n]) for n, tensor in mixed["found"].items())


@pytest.mark.parametrize("case", [*(f"{stage} {dtype}" for stage, dtype in COPIED), "proximal", "reset"])
def test_a_copy_beside_a_step_has_the_state_before_its_update(ranks: list[dict[str, Any]], case: str) -> None:
    """Bit for bit, on all ranks, although forward and backward passes were over before it began."""
    for rank in ranks:
        assert rank[f"copied {case}"] == {"kept": True, "changed": True}
