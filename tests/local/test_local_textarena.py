"""Games of textarena itself, installed in an environment of its own: they are repeatable, and the run file of the docs trains on one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from runs import ROOT

pytestmark = [pytest.mark.local, pytest.mark.full, pytest.mark.timeout(1800)]

PLAY = """
import json, random, sys
from scalerl_extras.textarena_games import TextArena
from scalerl_tasks.prompts import Prompt

MOVES = ["[1]", "up", "[2 3]", "red", "<think>[9]</think>A", "[hit]", "", "[0 0]", "[1 1 5]", "[é\\ud800]"]

def play(environment, seed, moves):
    said = []
    for count in range(1, len(moves) + 1):
        step = environment.step(Prompt(f"{seed}", "", "", metadata={"seed": seed}), moves[:count])
        assert 0 <= step.reward <= 1 and (step.done or all(step.messages) and len(step.messages) == 1), step
        said.append((list(step.messages), step.done, step.reward))
        if step.done:
            break
        random.random()  # what another game would draw
    return said

found = {}
for game in sys.argv[1:]:
    environment, again = TextArena(game), TextArena(game)
    again.kept = 0  # each step replays the game
    for seed in (0, 1):
        moves = random.Random(seed).choices(MOVES, k=8)
        found[f"{game} {seed}"] = play(environment, seed, moves)
        assert play(again, seed, moves) == found[f"{game} {seed}"], game
print(json.dumps(found))
"""
GAMES = (
    *("2048-v0-ultra-easy", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0"),
    *("FifteenPuzzle-v0", "FrozenLake-v0-random", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0"),
    *("Mastermind-v0", "Minesweeper-v0", "PegJump-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0"),
    *("Sokoban-v0", "Sudoku-v0", "ThreeCardMonte-v0", "TowerOfHanoi-v0", "RushHour-v0"),
)
"""Those that the docs name."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with textarena, and all that this one has."""
    venv = tmp_path_factory.mktemp("textarena") / "venv"
    program, uv = venv / "bin/python", str(Path(sys.executable).with_name("uv"))
    lock = str(ROOT / "requirements/textarena.txt")
    options = ["-q", "--no-deps", "--require-hashes", "--python", str(program), "-r", lock]
    for command in ([uv, "venv", "-q", "-p", sys.executable, str(venv)], [uv, "pip", "install", *options]):
        subprocess.run(command, check=True, timeout=600)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(program)


def test_games_are_repeatable(python: str) -> None:
    """Also in another process, with other hashes, and while other games draw."""
    played = [
        subprocess.run(
            [python, "-c", PLAY, *GAMES],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            check=True,
            capture_output=True,
            timeout=600,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    ]
    assert played[0] == played[1]
    assert json.loads(played[0]).keys() == {f"{game} {seed}" for game in GAMES for seed in (0, 1)}


@pytest.mark.parametrize(
    ("game", "says"),
    [
        ("TicTacToe-v0", "has several players, and textarena has no opponent that is offline"),
        ("GuessWho-v0", "asks a model over the network"),
        ("Hangman-v0", "python -m nltk.downloader words"),
        ("GuessTheNumbr-v0", "did you mean 'GuessTheNumber-v0'"),
    ],
)
def test_other_games_are_refused(python: str, game: str, says: str) -> None:
    command = [python, "-m", "scalerl_extras.textarena_games", game, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_words_of_nltk_are_found_without_a_download(python: str, tmp_path: Path) -> None:
    words = tmp_path / "corpora/words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text("lamp\nhouse\n")
    command = [python, "-m", "scalerl_extras.textarena_games", "Hangman-v0", "2"]
    env = {"NLTK_DATA": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert "Hangman" in json.loads(done.stdout.splitlines()[0])["prompt"]


def test_run_file_of_the_docs_trains(python: str, tmp_path: Path) -> None:
    """Word for word, with that interpreter."""
    section = (ROOT / "docs/environments.md").read_text().partition("### Games of textarena")[2]
    section = section.partition("\n## ")[0]
    command = re.search(r"^ +```\n(.*?)^ +```", section, re.MULTILINE | re.DOTALL)
    run = re.search(r"^ +```yaml\n(.*?)^ +```", section, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert run is not None
    (tmp_path / "run.yaml").write_text(textwrap.dedent(run[1]))
    path = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", command[1]], cwd=tmp_path, check=True, timeout=60, env=os.environ | path)
    arguments = [python, "-m", "scalerl_cli.main", "run", "run.yaml", "--dir", "run"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5))
    assert sum(row["grading_errors"] for row in rows if "grading_errors" in row) == 0
    assert max(row["episode_turns"] for row in rows) > 1
    assert any(row["filtered_groups"] < 8 for row in rows), "trained"
