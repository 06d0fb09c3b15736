"""verifier.python: the signatures, and what functions do wrong."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from scalerl_tasks import Graded, GradingPool, Prompt, Verdict, VerifierConfig, VerifierError
from scalerl_tasks.code_digest import code_digest, keep_code
from scalerl_tasks.python_function import PythonFunction
from scalerl_tasks.python_verifier import PythonVerifier

FILE = Path(__file__).parent / "rewards" / "project_rewards.py"
ROW = Prompt("row-7", "2 + 2?", "4", metadata={"row": [1, 2]})
VERL = Prompt(
    "gsm8k-3",
    "2 + 2?",
    "4",
    labels={"data_source": "openai/gsm8k"},
    metadata={"reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}},
)


def function(name: str, **options: Any) -> PythonFunction:
    return PythonFunction(name, path=str(FILE), **options)


async def graded(
    given: PythonFunction, prompt: Prompt, completions: list[str], **limits: Any
) -> list[Graded]:
    async with GradingPool(VerifierConfig("python", python=given), **limits) as pool:
        return await pool.score_group(prompt, completions)


def scores(given: PythonFunction, prompt: Prompt, *completions: str) -> list[Any]:
    """Scores without processes; None where the function does not apply."""
    verifier = PythonVerifier(given)
    if verifier.whole:
        return verifier.score_group(prompt, list(completions))
    return [verifier.score(prompt, one) for one in completions]


# --- signatures ---------------------------------------------------------------------------------------


def test_verl_function_and_its_row():
    assert scores(function("compute_score", signature="verl"), VERL, "so #### 4", "#### 5", "4") == [
        Verdict(1.0),
        Verdict(0.0),
        Verdict(0.0),
    ]


def test_verl_batch_function_with_a_decimal_parameter():
    given = function("compute_score_batch", signature="verl", parameters={"bonus": "0.25"})
    assert scores(given, VERL, "4", "5") == [1.25, 0.25]


def test_verl_function_of_two_arguments():
    given = function("short_compute_score", signature="verl", parameters={"format_score": "0.5"})
    assert scores(given, VERL, "it is 4", "it is 5", "none") == [1.0, 0.5, 0.0]


def test_verl_function_may_evaluate_a_completion():
    """Its ground truth is a dict, and the audit guard does not hold trusted code."""
    prompt = Prompt(
        "c", "", "x", metadata={"reward_model": {"ground_truth": {"numbers": [2, 3], "target": 6}}}
    )
    given = function("countdown", signature="verl")
    assert scores(given, prompt, "<answer>2 * 3</answer>", "<answer>2 * 2</answer>", "6") == [1.0, 0.1, 0.0]


def test_trl_function_of_a_conversation():
    given = function("format_reward", signature="trl", chat=True)
    assert scores(given, ROW, "<think>a</think><answer>4</answer>", "4") == [1.0, 0.0]


def test_trl_function_of_texts_with_its_range():
    given = function("reward_len", signature="trl", range=(-100.0, 0.0))
    assert scores(given, ROW, "x" * 20, "x") == [0.0, -19.0]


def test_trl_function_gets_columns_and_may_not_apply():
    row, other = (Prompt("a", "q", "4", metadata={"ground_truth": truth}) for truth in ("4", "skip"))
    given = function("accuracy", signature="trl")
    assert scores(given, row, "4", "5") == [1.0, 0.0]
    assert scores(given, other, "4") == [None]
    with pytest.raises(
        VerifierError,
        match=r"needs the column 'ground_truth', which the prompt row-7 does not have \(it has answer, row\)",
    ):
        scores(given, ROW, "4")


def test_trl_function_gets_no_solution_that_the_row_does_not_have(tmp_path):
    (tmp_path / "r.py").write_text(
        "def same(completions, solution, **kwargs): return [float(a == b) for a, b in zip(completions, solution)]\n"
    )
    given = PythonFunction("same", path=str(tmp_path / "r.py"), signature="trl")
    assert scores(given, Prompt("a", "q", "4", solution="2 + 2"), "2 + 2", "4") == [1.0, 0.0]
    with pytest.raises(VerifierError, match=r"needs the column 'solution', .* \(it has answer, row\)"):
        scores(given, ROW, "4")


def test_trl_function_of_token_ids_or_of_the_other_format(tmp_path):
    (tmp_path / "r.py").write_text(
        "def ids(completions_ids, **kwargs): return [len(ids) for ids in completions_ids]\n"
        "def of_messages(completions, **kwargs): return [len(c[0]['content']) for c in completions]\n"
    )
    given = {"path": str(tmp_path / "r.py"), "signature": "trl"}
    with pytest.raises(VerifierError, match="needs completions_ids, but functions get texts, not token ids"):
        PythonVerifier(PythonFunction("ids", **given)).score(Prompt("row-7", "q", "a"), "a")
    with pytest.raises(VerifierError, match=r"with prompt.format: Raw, .* are texts, with Chat messages$"):
        PythonVerifier(PythonFunction("of_messages", **given)).score(Prompt("row-7", "q", "a"), "a")
    assert (
        PythonVerifier(PythonFunction("of_messages", **given, chat=True)).score(
            Prompt("row-7", "q", "a"), "ab"
        )
        == 2
    )


def test_import_at_the_limit_of_memory_says_what_to_raise(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(completion): raise ImportError('libx.so: failed to map segment from shared object')\n"
    )
    with pytest.raises(
        VerifierError, match=r"failed to map segment .*; raise verifier.memory, or import at the head"
    ):
        PythonVerifier(PythonFunction("f", path=str(tmp_path / "r.py"))).score(Prompt("row-7", "q", "a"), "a")


def test_arguments_are_copies(tmp_path):
    (tmp_path / "r.py").write_text(
        "def seen(metadata):\n    count = len(metadata['a']['b'][0])\n    metadata['a']['b'][0]['more'] = 1\n"
        "    metadata['a']['b'].insert(0, {1: 1, 2: 2, 3: 3})\n    return count\n"
    )
    row = Prompt("row-7", "q", "4", metadata={"a": {"b": [{}]}, "c": (1,), "d": None})
    assert scores(PythonFunction("seen", path=str(tmp_path / "r.py")), row, "4", "4") == [0, 0]


async def test_coroutine_function_of_a_batch():
    assert [g.score for g in await graded(function("judge", signature="trl"), ROW, ["abc", "a"])] == [
        0.3,
        0.1,
    ]


async def test_coroutines_of_one_completion_run_together():
    found = await graded(function("slow_one"), ROW, ["4"] * 20 + ["bad"])
    assert [g.score for g in found] == [1.0] * 20 + [0.0]
    line = 1 + FILE.read_text().splitlines().index('        raise ValueError("refused")')
    assert found[-1].error == (
        f"project_rewards.py:slow_one raised ValueError: refused (project_rewards.py, line {line}) for the prompt row-7"
    )


async def test_parts_and_range_of_a_function():
    found = await graded(function("with_parts", range=(-1.0, 1.0)), ROW, ["abc"])
    assert found == [Graded(Verdict(0.75, {"length": 3.0, "reward": 0.5}))]


# --- what functions do wrong ----------------------------------------------------------------------------


async def test_each_wrong_result_has_one_message_and_the_others_are_graded():
    wrong = {
        "raise": "raised ValueError: cannot read this (project_rewards.py, line ",
        "raise nothing": "raised AssertionError (project_rewards.py, line ",
        "exit": "raised SystemExit: 1",
        "text": "returned '0.5' (text) for the prompt row-7; return a number",
        "nan": "gave nan, which is not in [0, 1]",
        "list": "returned [1.0] (list)",
        "dict": "returned {'reward': 1} (dict) for the prompt row-7; a dict needs the key 'score'",
        "high": "gave 2, which is not in [0, 1] (verifier.range), for the prompt row-7",
        "huge": "(int) for the prompt row-7; not a number",
        "die": "the grader by project_rewards.py:score of the prompt row-7 died 2 times",
        "memory": "grading needed more than",
    }
    found = await graded(function("score"), ROW, ["4", *wrong, "none", "5", "4"])
    first, *bad, none, other, last = found
    assert (first, other, last) == (Graded(Verdict(1.0)), Graded(Verdict(0.0)), Graded(Verdict(1.0)))
    assert none == Graded(None, "not applicable: the verifier gave None")
    for says, one in zip(wrong.values(), bad, strict=True):
        assert one.verdict is None
        assert says in (one.error or ""), one.error
        assert "project_rewards.py:score" in (one.error or "") or "memory" in (one.error or "")
    (slow,) = await graded(function("score"), ROW, ["slow"], timeout_seconds=1.0)
    assert slow == Graded(
        None, "grading by project_rewards.py:score of the prompt row-7 took longer than 1 s and was killed"
    )


async def test_children_of_a_function_end_with_its_grader():
    before = set(_children_named("sleep"))
    found = await graded(function("score"), ROW, ["child"], timeout_seconds=1.0)
    assert "took longer" in (found[0].error or "")
    async with asyncio.timeout(120):  # what was killed may take a moment to end
        while set(_children_named("sleep")) - before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _children_named(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[:2] == [name.encode(), b"600.25"]:
                found.append(int(entry.name))
    return found


async def test_group_function_that_fails_fails_its_group_once():
    config = VerifierConfig("python", python=function("ranks", signature="group"))
    async with GradingPool(config) as pool:
        assert [g.score for g in await pool.score_group(ROW, ["b", "a", "c"])] == [0.0, 0.1, 0.2]
        died = await pool.score_group(ROW, ["die", "a"])
        assert all("died 2 times on this group" in (g.error or "") for g in died)
    async with GradingPool(config, timeout_seconds=1.0) as pool:
        slow = await pool.score_group(ROW, ["slow", *"abcdefg"])
        assert pool.counts.timeouts == 1, "not one for each of eight"
        assert {g.error and g.error.rpartition(" took")[0] for g in slow} == {
            "grading by project_rewards.py:ranks of the prompt row-7"
        }
        assert [g.score for g in await pool.score_group(ROW, ["b", "a"])] == [0.0, 0.1]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"wrong_number": 1}, "returned 3 rewards for 2 completions of the prompt row-7; return one each"),
        ({"wrong_number": -1}, "returned 1 rewards for 2 completions"),
        ({"text": True}, "returned '00' (text) for 2 completions of the prompt row-7; return a list"),
    ],
)
def test_group_function_of_a_wrong_result(parameters, says):
    with pytest.raises(VerifierError) as caught:
        scores(function("ranks", signature="group", parameters=parameters), ROW, "a", "b")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import nopackage_at_all\n",
            "there is no module 'nopackage_at_all' (bad.py, line 1); if only a trainer",
        ),
        ("def score(:\n", "cannot be imported: SyntaxError"),
        ("raise SystemExit(1)\n", "cannot be imported: SystemExit: 1 (bad.py, line 1)"),
        ("\n1 / 0\n", "ZeroDivisionError: division by zero (bad.py, line 2)"),
        ("def scores(): ...\n", "has no function 'score'; did you mean 'scores'?"),
        (
            "def score(completion, truth): ...\n",
            "the function needs truth; this signature gives answer, completion",
        ),
        ("def score(completion, /): ...\n", "takes arguments without a name"),
        ("score = 3\n", "has no function 'score'"),
        (
            "from .near import x",
            "relative import with no known parent package (bad.py, line 1); install its package",
        ),
    ],
)
def test_file_that_cannot_be_used(tmp_path, monkeypatch, source, says):
    (tmp_path / "bad.py").write_text(source)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(VerifierError) as caught:
        PythonVerifier(PythonFunction("score", path=str(tmp_path / "bad.py")))
    assert says in str(caught.value)


async def test_file_that_ends_the_fork_server_is_a_verifier_error(tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit(1)\n")
    with pytest.raises(VerifierError, match="cannot be imported: SystemExit: 1"):
        await graded(PythonFunction("score", path=str(tmp_path / "bad.py")), ROW, ["4"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "/nowhere/reward.py"}, "/nowhere/reward.py does not exist"),
        ({"path": str(FILE.parent)}, "is not a file"),
        ({"module": "no_such_package.rewards"}, "there is no module 'no_such_package'"),
        (
            {"path": str(FILE), "parameters": {"margin": 1}},
            "parameters.margin is no argument of the function",
        ),
        (
            {"path": str(FILE), "parameters": {"answer": 1}},
            "parameters.answer is an argument of the signature",
        ),
    ],
)
def test_settings_that_cannot_be_used(given, says):
    with pytest.raises(VerifierError) as caught:
        PythonVerifier(PythonFunction("score", **given))
    assert says in str(caught.value)


def test_parameter_that_is_no_number():
    with pytest.raises(VerifierError, match=r"parameters.format_score is 'high', not a number"):
        PythonVerifier(function("short_compute_score", signature="verl", parameters={"format_score": "high"}))


def test_installed_module():
    given = PythonFunction("last_box", module="scalerl_tasks.answers.extraction", parameters={"text": "x"})
    assert PythonVerifier(given).label == "scalerl_tasks.answers.extraction:last_box"


# --- digest ---------------------------------------------------------------------------------------------


def test_digest_follows_the_neighbours_that_are_imported(tmp_path):
    reward, near, package = tmp_path / "reward.py", tmp_path / "near.py", tmp_path / "parts"
    package.mkdir()
    reward.write_text("import json, near\nfrom parts.a import x\ndef score(): ...\n")
    near.write_text("import reward\n")
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from . import b\n")
    (package / "b.py").write_text("x = 1\n")
    (tmp_path / "unrelated.py").write_text("")
    digests = [code_digest(reward)]
    for file in (package / "b.py", near, reward, package / "__init__.py"):
        file.write_text(file.read_text() + "\n# edited\n")
        digests.append(code_digest(reward))
    assert len(set(digests)) == 5
    (tmp_path / "unrelated.py").write_text("x = 2\n")
    assert code_digest(reward) == digests[-1]


def test_module_of_an_editable_install(tmp_path, monkeypatch):
    """Which is found by a finder of its own, not by a path."""
    file = tmp_path / "edited_here.py"
    file.write_text("def score(completion): return 0.5\n")

    class Editable:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.util.spec_from_file_location(name, file) if name == "edited_here" else None

    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    digest = code_digest(module="edited_here")
    given = PythonFunction("score", module="edited_here", digest=digest)
    keep_code(digest, module="edited_here")
    file.write_text("def score(completion): return 1.0\n")
    assert importlib.import_module("edited_here").score("") == 0.5
    assert code_digest(module="edited_here") != digest
    with pytest.raises(VerifierError, match="edited_here: the code of the reward has changed"):
        PythonVerifier(given)


async def test_graders_keep_the_code_of_their_digest(tmp_path):
    reward, near = tmp_path / "reward.py", tmp_path / "near.py"
    for version, value in (("old", 0.25), ("new", 0.5)):  # as a ConfigMap is mounted
        (tmp_path / version).mkdir()
        (tmp_path / version / "reward.py").write_text(
            "def score(completion):\n    import near\n    return near.VALUE\n"
        )
        (tmp_path / version / "near.py").write_text(f"VALUE = {value}\n")
    for link, target in ((reward, "data/reward.py"), (near, "data/near.py"), (tmp_path / "data", "old")):
        link.symlink_to(target)
    given = PythonFunction("score", path=str(reward), digest=code_digest(reward))
    async with GradingPool(VerifierConfig("python", python=given)) as pool:
        (tmp_path / "data").unlink()
        (tmp_path / "data").symlink_to("new")  # before the first import of near
        assert (await pool.score_group(ROW, ["4"]))[0].score == 0.25
        server = pool._server._process.pid
        for pid in _children(server):
            os.kill(pid, signal.SIGKILL)
        assert (await pool.score_group(ROW, ["4"]))[0].score == 0.25
        os.kill(server, signal.SIGKILL)
        with pytest.raises(VerifierError, match=r"reward.py: the code of the reward has changed since"):
            await _graded_until_refused(pool, 0.25)
        near.write_text("VALUE = 0.25\n")
        assert (await pool.score_group(ROW, ["4"]))[0].score == 0.25
    assert not (tmp_path / "__pycache__").exists()


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def _graded_until_refused(pool: GradingPool, score: float) -> None:
    for _ in range(3000):  # the death of a process is not noticed at once
        assert (await pool.score_group(ROW, ["4"]))[0].score == score
        await asyncio.sleep(0.01)


def test_digest_does_not_depend_on_the_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("raise SystemExit('must not run')\n")
    assert code_digest(tmp_path / "a" / "reward.py") == code_digest(tmp_path / "b" / "reward.py")


def test_digest_of_a_module():
    one = code_digest(module="json.decoder")
    assert one == code_digest(module="json.decoder") != code_digest(module="json.encoder")
    with pytest.raises(VerifierError, match="no package 'nopackage_at_all'"):
        code_digest(module="nopackage_at_all.rewards")
    with pytest.raises(VerifierError, match=r"no module 'json\.nothing'"):
        code_digest(module="json.nothing")
