"""Episodes on servers with OpenEnv's protocol: replies, graders, and times that tests can wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scalerl_tasks import Graded, Prompt, Verdict
from scalerl_tasks.environments.protocol import Message, write_replies
from scalerl_tasks.environments.server_grader import ServerGrader
from scalerl_tasks.environments.server_settings import EnvironmentServer
from scalerl_tasks.environments.timings import Timings

TIMINGS = Timings(first_back_off=0.02, max_back_off=0.05, waiting=0.02, ended=600.0, idle=600.0)
PROMPT = Prompt("row-7", "Say it.", "4", metadata={"level": 3})


def said(score: float, text: str) -> Graded:
    return Graded(Verdict(score), None, (Message(text),))


async def steps(
    grader: ServerGrader, *episodes: list[str], prompt: Prompt = PROMPT, **given: Any
) -> list[Graded]:
    found = await grader.score_group(prompt, [write_replies(episode) for episode in episodes], **given)
    return [
        replace(one, verdict=one.verdict and Verdict(round(one.score, 6), one.verdict.parts)) for one in found
    ]


def options(url: str, **changes: Any) -> EnvironmentServer:
    return EnvironmentServer(url, **{"timeout_seconds": 120.0, **changes})


def grading(server: EnvironmentServer, **seconds: float) -> ServerGrader:
    return ServerGrader(server, replace(TIMINGS, **seconds))
