"""Sources and verifiers of packages of one's own, and the services and interface of the examples."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from aiohttp import web

from scalerl_api.source import EvaluationTaskSpec
from scalerl_tasks import Graded, Prompt, SourceError, Verdict, VerifierError, open_grading_pool, open_source
from scalerl_tasks.grading.http_grader import HttpGrader, RewardService
from scalerl_tasks.open_graders import grading_digest, verifier_config
from scalerl_tasks.plugins import Plugin, PluginVerifier, open_plugin_source

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, project: dict) -> None:
    """What ``pip install`` leaves of a package, seen by this process and by those that grade."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.fixture
def countdown(tmp_path, monkeypatch):
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(tmp_path, monkeypatch, project)
    (tmp_path / "countdown_task.py").write_text((EXAMPLE / "countdown_task.py").read_text())
    return tmp_path


def spec(name: str = "countdown", **parameters: int) -> EvaluationTaskSpec:
    return EvaluationTaskSpec.model_validate(
        {
            "plugin": {"name": name, "parameters": parameters},
            "verifier": {"name": name},
        }
    )


async def test_example_package_is_a_source_and_a_verifier(countdown):
    source = open_source(spec(size=30))
    assert len(source) == 30
    assert source.difficulty(3) is None
    prompt = source[3]
    a, b, c = prompt.metadata["numbers"]
    async with open_grading_pool(spec()) as grader:
        assert grader.part_names == ("numbers",)
        found = await grader.score_group(prompt, [prompt.answer, f"{c} - {a} * {b}", "import os", f"{a}"])
        checked: list[str | None] = []
        await grader.check([prompt], checked.append)
    assert [one.score for one in found] == [1.0, 0.1, 0.0, 0.0]
    assert found[1] == Graded(Verdict(0.1, {"numbers": 1.0}))
    assert checked == [None]


def test_example_package_is_short():
    assert len((EXAMPLE / "countdown_task.py").read_text().splitlines()) <= 60


def test_digest_of_a_plugin_is_that_of_its_code(countdown):
    before = grading_digest(spec())
    code = countdown / "countdown_task.py"
    code.write_text(code.read_text().replace("0.1 * right", "0.2 * right"))
    assert grading_digest(spec()) != before


def test_plugin_of_other_code_is_refused(countdown):
    config = verifier_config(spec())
    assert config.plugin is not None
    code = countdown / "countdown_task.py"
    code.write_text(code.read_text() + "\n")
    with pytest.raises(VerifierError, match="countdown_task: the code of the reward has changed"):
        PluginVerifier(config.plugin)


def test_plugin_that_is_not_installed(countdown):
    with pytest.raises(SourceError, match=r"no installed package has it.*did you mean 'countdown'"):
        open_source(spec("countdwon"))
    with pytest.raises(VerifierError, match=r"no installed package has it.*did you mean 'countdown'"):
        PluginVerifier(Plugin("countdwon"))
    with pytest.raises(VerifierError, match="no installed package has it"):
        grading_digest(spec("other"))


def test_plugin_whose_class_fails(countdown):
    with pytest.raises(
        SourceError,
        match=r"'countdown' \(countdown_task:Countdown\): parameters: .*'sizes'; it takes size, largest, seed",
    ):
        open_source(spec(sizes=3))


@pytest.mark.parametrize(
    ("code", "group", "says"),
    [
        ("class Own:\n    pass\n", "sources", "Own has no __len__"),
        (
            "class Own(list):\n    digest = ''\n    def __init__(self): self.append(1)\n",
            "sources",
            "its item 0 is int",
        ),
        (
            "class Own(list):\n    digest = ''\n    def __init__(self): self.append(None)\n",
            "sources",
            "its item 0 is NoneType",
        ),
        (
            "class Own(dict):\n    digest = ''\n    def __init__(self): self['a'] = 1\n",
            "sources",
            "its item 0: KeyError: 0",
        ),
        ("import sys\nsys.exit()\n", "sources", "SystemExit"),
        ("class Own:\n    pass\n", "verifiers", "Own has no method score"),
        ("import nopackage_at_all\n", "verifiers", "No module named 'nopackage_at_all'"),
    ],
)
def test_plugin_that_is_incomplete(tmp_path, monkeypatch, code, group, says):
    entry = {f"scalerl.{group}": {"own": "own_plugin:Own"}}
    install(tmp_path, monkeypatch, {"name": "own", "version": "1", "entry-points": entry})
    (tmp_path / "own_plugin.py").write_text(code)
    with pytest.raises((SourceError, VerifierError), match=says):
        open_plugin_source(Plugin("own")) if group == "sources" else PluginVerifier(Plugin("own"))


async def test_two_packages_with_one_name(countdown, monkeypatch):
    other = {"scalerl.verifiers": {"countdown": "other:Verifier"}}
    install(countdown / "other", monkeypatch, {"name": "other", "version": "1", "entry-points": other})
    with pytest.raises(
        VerifierError, match=r"several packages have it.*other:Verifier; uninstall all but one"
    ):
        PluginVerifier(Plugin("countdown"))


# --- the judge of the examples, and the description of the interface ----------------------------------------


async def test_example_judge_speaks_the_documented_interface(monkeypatch):
    """The endpoint of the judge is made here; service and client are the real ones."""
    asked: list[dict] = []

    async def model(request: web.Request) -> web.Response:
        asked.append(await request.json())
        said = asked[-1]["messages"][0]["content"]
        text = (
            "Good. Score: 10" if "<reply>\n4\n" in said else "Score: 2.5" if "<reply>\n5\n" in said else "?"
        )
        return web.json_response({"choices": [{"message": {"content": text}}]})

    requests: list[dict] = []

    @web.middleware
    async def record(request: web.Request, handler):
        requests.append(json.loads(await request.read()))
        return await handler(request)

    service = runpy.run_path(str(ROOT / "examples" / "judge" / "service.py"))["app"]
    service.middlewares.append(record)
    endpoint = web.Application()
    endpoint.router.add_post("/v1/chat/completions", model)
    runners = []
    try:
        urls = []
        for app in (endpoint, service):
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
        monkeypatch.setenv("JUDGE_URL", f"{urls[0]}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "judge")
        async with HttpGrader(RewardService(f"{urls[1]}/score", range=(0.0, 10.0))) as grader:
            found = await grader.score_group(Prompt("a", "2 + 2?", "4", metadata={"n": 1}), ["4", "5", "x"])
    finally:
        for runner in runners:
            await runner.cleanup()
    assert [one.score for one in found] == [1.0, 0.25, 0.0]
    assert found[2].verdict is None
    document = yaml.safe_load((ROOT / "docs" / "reward-service.yaml").read_text())
    schema = {"$ref": "#/components/schemas/Request", "components": document["components"]}
    assert requests
    for request in requests:
        jsonschema.validate(request, schema)
