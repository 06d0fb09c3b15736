"""Messages between ranks: one of the group's peers is hostile."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from free_port import free_port

from scalerl_trainer.engine import passes as passes_module
from scalerl_trainer.ranks import RankLost

WORKER = Path(__file__).with_name("ranks_worker.py")
ROOT = Path(__file__).parents[2]

_CODE = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Collectives of torch that unpickle what they receive."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What rank 0 got from each message of its peer."""
    marker, port = tmp_path_factory.mktemp("ranks") / "executed", free_port()
    command = [sys.executable, str(WORKER)]
    peer = subprocess.Popen([*command, "1", str(port), str(marker)])
    try:
        own = subprocess.run(
            [*command, "0", str(port), str(marker)], capture_output=True, text=True, timeout=240
        )
        assert own.returncode == 0, own.stderr
        assert peer.wait(120) == 0
    finally:
        peer.kill()
    assert not marker.exists(), "the peer's code was executed"
    return json.loads(own.stdout.splitlines()[-1])


def test_valid_message_is_received(found: dict[str, str]) -> None:
    assert found["valid"] == "[(0, 'zero'), (1, 'one')]"
    assert found["broadcast"] == "(0, 'zero')"


@pytest.mark.parametrize("message", ["pickle", "other type", "deep", "cut off", "extension"])
def test_other_content_is_refused(found: dict[str, str], message: str) -> None:
    assert found[message].startswith(
        "RankLost: rank 1 of the trainer sent something else than tuple[int, str]"
    )


@pytest.mark.parametrize("message", ["nothing", "negative", "too large", "huge"])
def test_other_size_is_refused_before_memory_is_allocated(found: dict[str, str], message: str) -> None:
    assert found[message].startswith("RankLost: lost a rank of the trainer: rank 1 announces a message of")


def test_message_that_cannot_be_encoded_raises_on_all_ranks(found: dict[str, str]) -> None:
    assert found["own"] == "UnicodeEncodeError"


def test_nothing_received_is_unpickled() -> None:
    """In the processes of a run: only the pool of graders pickles, for its own children. LiveCodeBench's tests are read by an
    unpickler that knows no name."""
    may_pickle = {
        "tasks/src/scalerl_tasks/grading/fork_client.py",
        "tasks/src/scalerl_tasks/grading/fork_server.py",
        "tasks/src/scalerl_tasks/grading/grader.py",
        "tasks/src/scalerl_tasks/programs/suites.py",
    }
    pickling = set()
    for path in ROOT.glob("*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in _CODE, f"{path}:{node.lineno}: {node.attr} unpickles what peers send"
            if isinstance(node, ast.Import) and {name.name for name in node.names} & {
                "pickle",
                "dill",
                "shelve",
            }:
                pickling.add(str(path.relative_to(ROOT)))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = {"weights_only": "True"}.items() <= {
                    k.arg: ast.unparse(k.value) for k in node.keywords
                }.items()
                assert safe, f"{path}:{node.lineno}: torch.load without weights_only=True"
    assert pickling == may_pickle


def test_impossible_announcement_of_another_rank_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``EngineError`` would end the run: its exit code says that a restart does not help."""
    answers = [torch.tensor([[1.0, 9.0]]), torch.tensor([[99.0, 0.0]])]
    monkeypatch.setattr(passes_module, "gather_vectors", lambda vector: answers.pop(0))
    passes: Any = SimpleNamespace(
        _settings=SimpleNamespace(gradient_guard=SimpleNamespace(min_tokens=1)), _device="cpu"
    )
    done: Any = SimpleNamespace(ordinary=torch.tensor(1.0), outliers_n=torch.tensor([9.0]))
    with pytest.raises(RankLost, match="announces 99 outliers of 10 tokens"):
        passes_module.Passes.masked(passes, done, 10)
