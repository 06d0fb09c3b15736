"""The head's Triton kernels, computed by Triton's interpreter, beside the head without them and float64; and when they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl_trainer.models import head
from scalerl_trainer.models.head import LogprobHead
from scalerl_trainer.models.logits import PLAIN, LogitTransform

WORKER = Path(__file__).with_name("head_kernels_worker.py")
BROKEN = [True] * 3 + [False] * 2 + [True] * 4 + [False] * 2
"""NaNs by row of the worker's: a NaN anywhere, no -inf, any inf, no finite logit, finite ones."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("case", ["plain", "temperature", "negative scale", "bias", "cap", "large"])
def test_kernels_compute_what_the_head_without_them_does(found: dict[str, Any], case: str) -> None:
    """With a vocabulary of 5,003 and 100, which is no multiple of a block, and of 151,936; chunks of four tokens and a last one of
    one; targets that are the most likely token and that are not; weights of both signs and of zero."""
    kernels, eager = found["whole"][case]["kernels"], found["whole"][case]["eager"]
    assert kernels["logprob"] < 5e-6
    assert kernels["entropy"] < 5e-6
    assert kernels["weightless"] == 0.0
    assert (kernels["at once"], eager["at once"]) == (True, True), (
        "gradients of the forward pass are the same"
    )
    for name in kernels.keys() - {"logprob", "entropy", "weightless", "at once"}:
        # Half a unit in the last place of bfloat16 is 2e-3 on average; a bias has few summands.
        assert kernels[name] < 3e-3
        assert kernels[name] == pytest.approx(eager[name], rel=1e-3)


def test_kernels_pass_on_logits_that_are_no_numbers(found: dict[str, Any]) -> None:
    broken = found["broken"]
    assert broken["nans"] == BROKEN
    assert broken["logprob"]
    # But where a target's logit is -inf: the head without kernels computes the normaliser from its log-probability.
    assert broken["derivative"] == [True] * 4 + [False] + [True] * 6
    assert broken["top"], "an index beyond the vocabulary would be read in the backward pass"


def test_kernels_take_the_first_of_equal_logits(found: dict[str, Any]) -> None:
    """Of one block and of different ones."""
    assert found["ties"] == [0, 7, 5001, 0]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The trial with tensors of the CPU, where Triton's kernels do not run: what they compute is given."""
    head.kernels_failure.cache_clear()

    class Device:
        type = "cuda"

        def __str__(self) -> str:
            return "cuda:0"

    cpu, linspace = torch.device("cpu"), torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *args, device: linspace(*args, device=cpu))
    yield Device()
    head.kernels_failure.cache_clear()


def logits(product_cv: torch.Tensor, bias_v: Any, transform: LogitTransform) -> torch.Tensor:
    logits_cv = product_cv if bias_v is None else product_cv + bias_v
    return logits_cv if transform.cap is None else transform.cap * (logits_cv / transform.cap).tanh()


def statistics(*args: Any) -> None:
    logits_cv = logits(*args[:3])
    logprobs = logits_cv.log_softmax(-1)
    args[5].copy_(logprobs.gather(1, args[4][:, None])[:, 0])
    args[6].copy_(logits_cv.logsumexp(-1))


def derivative(*args: Any) -> torch.Tensor:
    logits_cv = logits(*args[:3])
    cap = args[2].cap
    slope_cv = 1.0 if cap is None else 1.0 - (logits_cv / cap).square()
    return ((logits_cv - args[4][:, None]).exp() * slope_cv).bfloat16()


def test_trial_decides_once_and_names_the_reason(
    trial: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from scalerl_trainer.models import head_kernels

    calls: list[int] = []

    def no_compiler(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(head_kernels, "statistics", no_compiler)
    for _ in range(2):
        reason = head.kernels_failure(trial)
        assert reason == "a call of them fails: RuntimeError: Failed to find C compiler."
    assert calls == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the output head has no kernels on cuda:0: a call of them fails" in caplog.text


def test_trial_accepts_right_results_alone(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels without bias and cap and of those with both, which are compiled apart."""
    from scalerl_trainer.models import head_kernels

    monkeypatch.setattr(head_kernels, "statistics", statistics)
    monkeypatch.setattr(head_kernels, "derivative", derivative)
    assert head.kernels_failure(trial) is None
    for biased in (False, True):

        def wrong(*args: Any, biased: bool = biased) -> torch.Tensor:
            return derivative(*args) * (1.02 if (args[1] is not None) == biased else 1.0)

        head.kernels_failure.cache_clear()
        monkeypatch.setattr(head_kernels, "derivative", wrong)
        assert head.kernels_failure(trial) == "they compute something else"
    for name in ("bias_v", "cap"):

        def left_out(*args: Any, name: str = name) -> None:
            product_cv, bias_v, transform, *more = args
            given = (None, transform) if name == "bias_v" else (bias_v, PLAIN)
            statistics(product_cv, *given, *more)

        head.kernels_failure.cache_clear()
        monkeypatch.setattr(head_kernels, "derivative", derivative)
        monkeypatch.setattr(head_kernels, "statistics", left_out)
        assert head.kernels_failure(trial) == "they compute something else"


def test_trial_fails_where_a_kernel_with_bias_does(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalerl_trainer.models import head_kernels

    def no_compilation(*args: Any) -> None:
        if args[1] is not None:
            raise RuntimeError("ptxas died")
        statistics(*args)

    monkeypatch.setattr(head_kernels, "statistics", no_compilation)
    monkeypatch.setattr(head_kernels, "derivative", derivative)
    assert head.kernels_failure(trial) == "a call of them fails: RuntimeError: ptxas died"


def test_trial_without_triton(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scalerl_trainer.models.head_kernels", None)
    monkeypatch.delattr("scalerl_trainer.models.head_kernels", raising=False)
    assert str(head.kernels_failure(trial)).startswith("a call of them fails: ModuleNotFoundError: ")


@pytest.mark.parametrize(
    ("dtype", "fp32", "used"),
    [(torch.bfloat16, True, True), (torch.bfloat16, False, False), (torch.float32, True, False)],
)
def test_kernels_are_for_float32_logits_of_bfloat16(
    dtype: torch.dtype, fp32: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(head, "kernels_failure", lambda _: None)
    monkeypatch.setattr(head._ChunkedLogprob, "apply", lambda *args: given.extend(args))
    LogprobHead(torch.nn.Linear(2, 3, dtype=dtype), fp32=fp32)(None, None, 1.0, True)  # type: ignore[arg-type]
    assert given[-1] is used
