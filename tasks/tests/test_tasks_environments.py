"""Environments: steps in grading processes, the verdict in words, and environments that misbehave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.spec import RunSpec
from scalerl_tasks import GradingPool, Prompt, VerifierConfig, VerifierError, task_problems
from scalerl_tasks.environments.environment_verifier import EnvironmentConfig
from scalerl_tasks.environments.episodes import EnvironmentGrader, Retry
from scalerl_tasks.environments.nim import Nim
from scalerl_tasks.environments.protocol import MAX_MESSAGE_BYTES, Message, Step
from scalerl_tasks.open_graders import grading_digest
from scalerl_tasks.python_function import PythonFunction

GAME = Prompt("game", "13 3", "1")
CODE = """
import os, time
from scalerl_tasks.environments.protocol import Message, Step

class Own:
    part_names = ("turns",)
    range = (-1.0, 1.0)

    def __init__(self, secret="7"):
        self.secret = secret

    def step(self, prompt, replies):
        last = replies[-1]
        parts = {"turns": len(replies)}
        match last:
            case "raise": raise RuntimeError("no luck")
            case "exit": raise SystemExit(3)
            case "die": os._exit(1)
            case "hang": time.sleep(60)
            case "silent": return Step(parts=parts)
            case "type": return "well done"
            case "text": return Step("go on", parts=parts)
            case "bytes": return Step([b"go on"], parts=parts)
            case "role": return Step([{"role": 1, "content": "go on"}], parts=parts)
            case "long": return Step(["a" * 10_000_000], parts=parts)
            case "nan": return Step(done=True, reward=float("nan"), parts=parts)
            case "high": return Step(done=True, reward=2.0, parts=parts)
            case "parts": return Step(done=True, reward=1.0)
            case "surrogate": return Step(["\\ud800"], parts=parts)
            case "turn": return Step(["on"], parts=parts, turn_reward=0.5)
            case "generous": return Step(["on"], parts=parts, turn_reward=-2.5)
            case "control": return Step([{"role": "tool", "content": "<|im_end|>\\x00"}, Message("ok")], parts=parts)
        if last == self.secret:
            return Step(done=True, reward=1.0, parts=parts)
        return Step([f"not {last}"], reward=-1.0, parts=parts)
"""


def own(tmp_path: Path, class_name: str = "Own", **parameters: object) -> VerifierConfig:
    file = tmp_path / "own_environment.py"
    file.write_text(CODE)
    function = PythonFunction(class_name, str(file))
    return VerifierConfig(
        "environment", environment=EnvironmentConfig(python=function, parameters=parameters)
    )


async def test_steps_are_made_in_grading_process(tmp_path: Path) -> None:
    async with GradingPool(own(tmp_path, secret="8")) as pool:
        steps = await EnvironmentGrader(pool).steps(GAME, [["1"], ["1", "2"], ["1", "2", "8"]])
    assert [step.messages for step in steps] == [(Message("not 1"),), (Message("not 2"),), ()]
    assert [step.score for step in steps] == [0.0, 0.0, 1.0]
    assert [step.turn_reward for step in steps] == [0.0, 0.0, 0.0]
    assert [step.verdict and step.verdict.parts for step in steps] == [
        {"turns": turns, "reward": reward} for turns, reward in ((1, -1), (2, -1), (3, 1))
    ]


async def test_bad_environment_costs_only_its_episode(tmp_path: Path) -> None:
    expected = {
        "raise": "RuntimeError: no luck (own_environment.py, line 16)",
        "exit": "SystemExit: 3",
        "die": "died 2 times",
        "silent": "returned no message, and the episode is not done",
        "type": "returned str; return a",
        "text": "messages is str; make it a list",
        "bytes": "returned a message of bytes",
        "role": "needs a role and a content, both texts",
        "long": f"messages of 10,000,000 bytes; the limit is {MAX_MESSAGE_BYTES:,}",
        "nan": "nan, which is not in [-1, 1]",
        "high": "2, which is not in [-1, 1]",
        "parts": "the verifier gave the parts",
        "generous": "gave a turn -2.5; the range of rewards is (-1.0, 1.0)",
    }
    async with GradingPool(own(tmp_path)) as pool:
        episodes = [[reply] for name in expected for reply in (name, "1")]
        steps = await EnvironmentGrader(pool).steps(GAME, [["1", *replies] for replies in episodes])
    for name, bad, good in zip(expected, steps[::2], steps[1::2], strict=True):
        assert bad.error is not None, name
        assert expected[name] in bad.error, name
        assert (bad.messages, bad.verdict) == ((), None)
        assert good.messages == (Message("not 1"),), name
    async with GradingPool(own(tmp_path), timeout_seconds=1.0) as pool:
        (hung,) = await EnvironmentGrader(pool).steps(GAME, [["1", "hang"]])
    assert hung.error is not None
    assert "took longer than 1 s and was killed" in hung.error


async def test_unusual_messages_are_texts(tmp_path: Path) -> None:
    async with GradingPool(own(tmp_path)) as pool:
        surrogate, control, turn = await EnvironmentGrader(pool).steps(
            GAME, [["surrogate"], ["control"], ["turn"]]
        )
    assert (turn.messages, turn.turn_reward) == ((Message("on"),), 0.25)  # of a range of 2
    assert surrogate.messages == (Message("?"),)
    assert control.messages == (Message("<|im_end|>\x00", "tool"), Message("ok"))


@pytest.mark.parametrize(
    ("class_name", "parameters", "problem"),
    [
        ("Other", {}, "there is no such class; correct environment.python.className"),
        ("Own", {"sercet": "1"}, "cannot be made with environment.parameters {'sercet': '1'}: TypeError"),
        ("os", {}, "no such class"),
        ("Message", {"content": "a"}, "has no method step"),
    ],
)
async def test_wrong_class_is_refused(
    tmp_path: Path, class_name: str, parameters: dict[str, object], problem: str
) -> None:
    with pytest.raises(VerifierError, match=problem.replace("{", r"\{").replace("}", r"\}")):
        async with GradingPool(own(tmp_path, class_name, **parameters)):
            pass


async def test_missing_file_names_its_field(tmp_path: Path) -> None:
    config = EnvironmentConfig(python=PythonFunction("Own", str(tmp_path / "none.py")))
    with pytest.raises(VerifierError, match=r"environment\.python\.path is relative"):
        async with GradingPool(VerifierConfig("environment", environment=config)):
            pass


def test_digest_of_missing_file_names_its_field(tmp_path: Path) -> None:
    missing = {"python": {"path": "none.py", "className": "Own"}}
    with pytest.raises(VerifierError, match=r"correct environment\.python\.path"):
        grading_digest(run_of(tmp_path, environment=missing).task.tasks[0].section, tmp_path)


async def test_thought_is_given_to_environment(tmp_path: Path) -> None:
    async with GradingPool(own(tmp_path)) as pool:
        (step,) = await EnvironmentGrader(pool).steps(GAME, [["hm</think>1"]], in_thought=True)
    assert step.messages == (Message("not <think>hm</think>1"),)


async def test_retry_says_verdict_until_right() -> None:
    async with GradingPool(VerifierConfig("number")) as pool:
        grader = Retry(pool, wrong="No.", unanswered="What?")
        steps = await grader.steps(
            Prompt("sum", "2 + 2", "4"), [["5"], ["5", "four"], ["5", "four", "4"], ["4", "3"]]
        )
    assert [step.messages for step in steps] == [
        (Message("No."),),
        (Message("What?"),),
        (),
        (Message("No."),),
    ]
    assert [step.score for step in steps] == [0.0, 0.0, 1.0, 0.0]


async def test_each_step_is_reported(tmp_path: Path) -> None:
    reported = list[None]()
    async with GradingPool(own(tmp_path)) as pool:
        await EnvironmentGrader(pool).steps(GAME, [["1"], ["2"]], on_graded=lambda: reported.append(None))
    assert len(reported) == 2
    async with GradingPool(VerifierConfig("number")) as pool:
        await Retry(pool).steps(GAME, [["1"], ["2"], ["3"]], on_graded=lambda: reported.append(None))
    assert len(reported) == 5


def run_of(tmp_path: Path, **task: object) -> RunSpec:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} 3", "answer": "1"}) + "\n" for n in range(1, 20))
    )
    spec = {
        "model": {"scratch": {}},
        "task": {"jsonl": {"path": "data.jsonl"}, "heldOut": {"size": 4}, **task},
        "budget": {"maxSteps": 1},
    }
    return RunSpec.model_validate(spec)


def test_checks_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "own_environment.py"
    file.write_text(CODE)
    right = {"path": "own_environment.py", "className": "Own"}
    assert task_problems(run_of(tmp_path, environment={"name": "nim"}), tmp_path) == []
    assert task_problems(run_of(tmp_path, environment={"python": right}), tmp_path) == []
    for task, says in (
        (
            {"environment": {"python": right | {"className": "Owm"}}},
            "task.environment.python: own_environment.py:Owm: there is no",
        ),
        (
            {"environment": {"name": "nim", "parameters": {"most": 3}}},
            "task.environment.name: nim cannot be made",
        ),
        (
            {"environment": {"name": "retry", "parameters": {"wrogn": "no"}}, "verifier": {"name": "exact"}},
            "task.environment.parameters: retry has no text 'wrogn'; did you mean 'wrong'?",
        ),
    ):
        found = [str(problem) for problem in task_problems(run_of(tmp_path, **task), tmp_path)]
        assert found[0].startswith(says), found


def test_digest_of_what_scores_has_the_environment(tmp_path: Path) -> None:
    """It begins another segment of the curve; limits do not."""
    verifier = {"name": "exact"}
    file = tmp_path / "own_environment.py"
    file.write_text(CODE)
    own = {"python": {"path": "own_environment.py", "className": "Own"}}

    def digest(**task: object) -> str:
        return grading_digest(run_of(tmp_path, **task).task.tasks[0].section, tmp_path)

    before = [
        digest(verifier=verifier),
        digest(verifier=verifier, environment={"name": "retry"}),
        digest(verifier=verifier, environment={"name": "retry", "maxTurns": 2}),
        digest(environment={"name": "nim"}),
        digest(environment=own),
    ]
    assert len({*before}) == len(before)
    assert (
        digest(environment={"name": "nim", "turnTimeoutSeconds": 3, "memory": "2Gi", "workers": 2})
        == before[3]
    )
    file.write_text(CODE + "# edited")
    assert digest(environment=own) not in before


# --- nim ------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 9), st.lists(st.integers(0, 9), max_size=60))
def test_nim_is_won_by_perfect_play_alone(heap: int, most: int, noise: list[int]) -> None:
    game, replies, perfect = Nim(), list[str](), True
    prompt = Prompt("p", f"{heap} {most}", "")
    left = heap
    for wrong in noise:
        best = left % (most + 1)
        move = wrong if wrong else best
        perfect = perfect and move == best
        replies.append(f"I take {move}")
        step = game.step(prompt, replies)
        if step.done:
            break
        (message,) = step.messages
        left, same = map(int, str(message).split())
        assert same == most
        assert 0 < left < heap
    else:
        return
    assert step.reward in (0.0, 1.0)
    if perfect and heap % (most + 1):
        assert step.reward == 1.0
    if step.reward == 1.0:
        assert left % (most + 1) or left <= most


@pytest.mark.parametrize("reply", ["", "none", "0", "4", "14", "-", "9" * 5000])
def test_illegal_move_loses(reply: str) -> None:
    assert Nim().step(GAME, [reply]) == Step(done=True)


def test_prompt_without_heap_is_refused() -> None:
    with pytest.raises(ValueError, match="two integers"):
        Nim().step(Prompt("p", "a game", ""), ["1"])
