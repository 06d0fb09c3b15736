"""``scalerl view``: who is admitted, what is served, and directories that cannot be shown."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, CookieJar, DummyCookieJar, web
from recorded_rollouts import record

from scalerl_analysis.metric_series import MAX_POINTS
from scalerl_cli.clusters.volume import Entry
from scalerl_cli.main import main
from scalerl_cli.page.mirror import update
from scalerl_cli.page.runs import NotARun, Run
from scalerl_cli.page.server import Server, bound
from scalerl_cli.run import command

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[2J\u202eevil\u0007"


def metrics(run: Path, steps: int, **values: float) -> None:
    run.mkdir(exist_ok=True)
    rows = (
        {"step": step, "reward": step / steps, "wall_seconds": 10.0 * (step + 1)} | values
        for step in range(steps)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    metrics(run, 3, entropy=1.5)
    record(
        run, [{"step": 0, "sample": at, "reward": at / 4, "completion": f"answer {at}"} for at in range(4)]
    )
    record(run, [{"step": 1, "completion": HOSTILE, "prompt": HOSTILE, "reward": 0.0}])
    return run


class Browser:
    """Requests to the page, with the cookies of a browser."""

    def __init__(self, session: ClientSession, server: Server, port: int) -> None:
        self.session, self.server, self.address = session, server, f"http://127.0.0.1:{port}"

    async def enter(self, token: str | None = None) -> int:
        async with self.session.get(
            f"{self.address}/", params={"token": token or self.server.token}
        ) as response:
            return response.status

    async def get(self, path: str, **parameters: Any) -> Any:
        async with self.session.get(self.address + path, params=parameters) as response:
            return await response.json()


@asynccontextmanager
async def browser(*directories: Path) -> AsyncIterator[Browser]:
    listening = bound(0, 0)
    port = listening.getsockname()[1]
    server = Server([Run(one) for one in directories])
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            yield Browser(session, server, port)
    finally:
        await runner.cleanup()


async def test_token_admits_one_browser(run: Path) -> None:
    async with browser(run) as first, ClientSession(cookie_jar=DummyCookieJar()) as other:
        used = first.server.token
        async with other.get(f"{first.address}/api/state") as response:
            assert (response.status, "token" in await response.text()) == (403, True)
        assert await first.enter("x" * 43) == 403
        assert await first.enter("\udcff") == 403
        assert await first.enter(used) == 200
        async with first.session.get(f"{first.address}/") as response:
            assert response.status == 200
            assert "<main" in await response.text()
        assert await first.enter(used) == 200  # the same browser again
        async with other.get(f"{first.address}/?token={used}") as response:
            assert response.status == 403
        cookie = next(iter(first.session.cookie_jar))
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"
        assert used not in (cookie.value, first.server.token)


async def test_answer_after_token_leads_to_address_without_it(run: Path) -> None:
    async with (
        browser(run) as page,
        page.session.get(f"{page.address}/?token={page.server.token}") as response,
    ):
        text = await response.text()
        assert 'http-equiv="refresh" content="0;url=/"' in text
        assert "token" not in text.lower()
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost:9"}, 200),  # through a tunnel, which may have another port
        ({"Host": "[::1]:9"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_requests_of_other_origins_are_refused(run: Path, headers: dict[str, str], status: int) -> None:
    async with browser(run) as page:
        host = {"Host": headers.get("Host", "localhost")}
        admitted = {"Host": "localhost" + "".join(re.findall(r":\d+$", host["Host"]))}
        async with ClientSession(cookie_jar=DummyCookieJar()) as bare:
            async with bare.get(f"{page.address}/?token={page.server.token}", headers=admitted) as response:
                cookies = [f"{name}={cookie.value}" for name, cookie in response.cookies.items()]
            cookie = {"Cookie": "; ".join(cookies)}
        async with (
            ClientSession(cookie_jar=DummyCookieJar()) as bare,
            bare.get(f"{page.address}/api/state", headers=headers | host | cookie) as response,
        ):
            assert response.status == status
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/page.css", "/icon.svg", "/api/state", "/api/curve", "/nothing"]
)
async def test_every_answer_has_the_policy(run: Path, path: str) -> None:
    async with browser(run) as page:
        await page.enter()
        async with page.session.get(page.address + path) as response:
            policy = response.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'self'")
            assert "unsafe" not in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.status == (404 if path == "/nothing" else 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/rollouts"])
async def test_page_is_read_only(run: Path, method: str, path: str) -> None:
    async with browser(run) as page:
        await page.enter()
        async with page.session.request(method, page.address + path) as response:
            assert response.status == 405


@pytest.mark.parametrize(
    "path", ["/../run.yaml", "/%2e%2e/run/token", "/page.js/../token", "/run.yaml", "/token", "/..%2ftoken"]
)
async def test_no_request_names_a_file(run: Path, path: str) -> None:
    (run / "token").write_text("secret")
    async with browser(run) as page:
        await page.enter()
        host, _, port = page.address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        cookie = "; ".join(f"{one.key}={one.value}" for one in page.session.cookie_jar)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
        assert b"secret" not in answer


async def test_rollouts_are_filtered_sorted_and_paged(run: Path) -> None:
    async with browser(run) as page:
        await page.enter()
        found = await page.get("/api/rollouts", step="0", sort="reward", descending="1", limit=2, offset=1)
        assert [row["sample"] for row in found["rows"]] == [2, 1]
        assert (found["matching"], found["total"]) == (4, 5)
        assert (await page.get("/api/rollouts", contains="answer 3"))["matching"] == 1
        assert (await page.get("/api/rollouts", contains="answer 3 "))["matching"] == 0  # spaces count
        assert (await page.get("/api/rollouts", reward="0.5:1", split="train"))["matching"] == 2
        steps = (await page.get("/api/prompt", prompt="p0"))["steps"]
        assert [(one["step"], one["completions"], one["reward"]) for one in steps] == [
            (0, 4, 0.375),
            (1, 1, 0.0),
        ]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("step", "a" * 300, "N, N:M, N: or :M"),
        ("reward", "1:0", "N, N:M, N: or :M"),
        ("sort", "x", "reward"),
        ("split", "../", "held-out"),
        ("limit", "-1", "whole number from 0"),
        ("sample", "9" * 25, "whole number from 0"),
        ("offset", "9" * 5000, "whole number from 0"),
        ("run", "9", ""),
        ("run", "x", ""),
        ("prompt", "\udcff", ""),
    ],
)
async def test_conditions_that_cannot_be_read_are_named(
    run: Path, name: str, value: str, accepted: str
) -> None:
    async with browser(run) as page:
        await page.enter()
        raw = "%FF" if value == "\udcff" else value
        async with page.session.get(f"{page.address}/api/rollouts?{name}={raw}") as response:
            found = await response.json()
            assert name in found.get("problem", "") or (raw == "%FF" and found["matching"] == 0)
            assert accepted in found.get("problem", "")


async def test_hostile_texts_are_data(run: Path) -> None:
    """The page sets texts as text nodes; the answer is JSON without characters that control a display."""
    long = "word " * 100_000
    record(run, [{"step": 2, "completion": long}, {"step": 2, "sample": 1, "completion": "שלום \u2067עולם"}])
    async with browser(run) as page:
        await page.enter()
        async with page.session.get(f"{page.address}/api/rollouts?step=1") as response:
            assert response.content_type == "application/json"
            row = (await response.json())["rows"][0]
        assert row["completion"] == HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace(
            "\u0007", "\\x07"
        )
        cut = (await page.get("/api/rollouts", step="2"))["rows"][0]
        assert len(cut["completion"]) < 1000
        assert cut["completion_cut"] > 400_000
        full = (await page.get("/api/rollouts", step="2", full="1"))["rows"]
        assert full[0]["completion"] == long
        assert full[1]["completion"] == "שלום \\u2067עולם"


async def test_tokens_have_their_text_version_and_difference(run: Path) -> None:
    """Characters that control a display are escaped by the token; figures of another text are not shown."""
    text = "a\x1b[2J€b"
    tokens = {"token_ends": [1, 6, 7, 7], "token_versions": [3, -1, 4, 4]}
    difference = {"token_logprob_differences": [0.5, math.nan, -2.0, 0.0]}
    record(run, [{"step": 2, "completion": text} | tokens | difference])
    record(run, [{"step": 3, "completion": text} | tokens | {"token_logprob_differences": None}])
    record(run, [{"step": 4, "completion": text + "c"} | tokens | difference])
    record(run, [{"step": 5, "completion": None} | dict.fromkeys([*tokens, *difference])])
    async with browser(run) as page:
        await page.enter()
        assert "by_token" not in (await page.get("/api/rollouts", step="2"))["rows"][0]
        found = [
            (await page.get("/api/rollouts", step=str(step), full="1"))["rows"][0]["by_token"]
            for step in (2, 3, 4, 5)
        ]
    assert found[0] == [["a", 3, 0.5], ["\\x1b[2J€", -1, None], ["b", 4, -2.0], ["", 4, 0.0]]
    assert [one[2] for one in found[1]] == [None] * 4
    assert found[2:] == [[], []]


async def test_numbers_that_are_not_finite(run: Path) -> None:
    """JSON has none."""
    record(run, [{"step": 2, "logprob_difference_max": math.inf, "parts": [("a", -math.inf), ("b", 0.5)]}])
    action = '{"x": Infinity, "y": 2}'
    line = '{"sequence": 0, "time": "t", "policy": "p", "decision": {"state": "OK", "reasons": [], "action": %s}}\n'
    (run / "decisions.jsonl").write_text(line % action)
    async with browser(run) as page:
        await page.enter()
        await page.get("/api/state")
        row = (await page.get("/api/rollouts", step="2", full="1"))["rows"][0]
        assert (row["logprob_difference_max"], row["parts"]) == (None, {"a": None, "b": 0.5})
        assert (await page.get("/api/decisions"))["decisions"][0]["action"] == {"x": None, "y": 2}


async def test_pages_of_two_machines_at_one_port_do_not_exclude_each_other(run: Path) -> None:
    """Tunnels lead from two ports here to the same port there; a browser sends the cookies of both to each."""
    async with browser(run) as one, browser(run) as other, ClientSession(cookie_jar=DummyCookieJar()) as bare:
        cookies = {}
        for page, port in ((one, 8660), (other, 8661)):
            address, host = f"{page.address}/?token={page.server.token}", {"Host": f"127.0.0.1:{port}"}
            async with bare.get(address, headers=host) as response:
                cookies |= {name: cookie.value for name, cookie in response.cookies.items()}
        sent = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
        for page, port in ((one, 8660), (other, 8661)):
            headers = sent | {"Host": f"127.0.0.1:{port}"}
            async with bare.get(f"{page.address}/api/state", headers=headers) as response:
                assert response.status == 200


async def test_files_of_a_reader_beside_the_record_are_left_alone(run: Path) -> None:
    (run / "rollouts" / "worst.parquet").write_bytes(next((run / "rollouts").iterdir()).read_bytes())
    async with browser(run) as page:
        await page.enter()
        assert (await page.get("/api/rollouts", step="last"))["total"] == 5


async def test_texts_that_are_no_unicode(run: Path) -> None:
    """Lone surrogates, in JSON as an escape, and bytes that are no UTF-8 in a file of another writer."""
    lone = (
        '{"sequence": 0, "time": "t", "policy": "p", "decision": {"state": "OK", "reasons": ["a\\ud800b"]}}\n'
    )
    (run / "decisions.jsonl").write_text("[]\n" + lone + '{"decision": 1}\n')
    text = b"the quick brown fox jumps"  # not compressed
    broken = record(run, [{"step": 2, "completion": text.decode()}])
    assert text in broken.read_bytes()
    broken.write_bytes(broken.read_bytes().replace(text, b"\xff" * len(text)))
    async with browser(run) as page:
        await page.enter()
        await page.get("/api/state")
        assert [one["reasons"] for one in (await page.get("/api/decisions"))["decisions"]] == [["a\ud800b"]]
        assert "is damaged" in (await page.get("/api/rollouts", step="2"))["problem"]
        assert (await page.get("/api/rollouts", step="1"))["matching"] == 1


async def test_browser_that_leaves_harms_no_other(run: Path) -> None:
    async with browser(run) as page:
        await page.enter()
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with page.session.get(
                    f"{page.address}/api/rollouts", timeout=ClientTimeout(total=0.0005)
                ) as response:
                    await response.read()
        assert (await page.get("/api/rollouts"))["total"] == 5


def test_command_prints_an_address_and_ends_with_a_signal(run: Path) -> None:
    command = [sys.executable, "-m", "scalerl_cli.main", "view", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", process.stdout.readline())
    assert found is not None
    with urllib.request.urlopen(found[0]) as response:
        assert b"refresh" in response.read()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out, errors) == (0, "", "")


async def test_torn_files_are_named_and_the_rest_is_shown(run: Path) -> None:
    torn = record(run, [{"step": 3}])
    torn.write_bytes(torn.read_bytes()[:200])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    async with browser(run) as page:
        await page.enter()
        found = await page.get("/api/rollouts")
        assert (len(found["rows"]), len(found["notes"])) == (5, 1)
        assert torn.name in found["notes"][0]
        assert (await page.get("/api/state"))["runs"][0]["steps"] == 3


async def test_state_grows_with_the_run(run: Path) -> None:
    """Lines that are complete meanwhile, a step that is trained again, and rollouts that are written."""
    async with browser(run) as page:
        await page.enter()
        before = (await page.get("/api/state"))["runs"][0]
        assert (await page.get("/api/state"))["runs"][0]["revisions"] == before["revisions"]
        with (run / "metrics.jsonl").open("a") as file:
            file.write(
                '{"step": 3, "reward": 0.5}\nno row\n[]\n{"step": 2, "reward": 0.25, "grad_norm": NaN}\n{"step": 2, "reward": 0.125}\n'
            )
        record(run, [{"step": 2}])
        after = (await page.get("/api/state"))["runs"][0]
        assert (after["steps"], after["reward"]) == (3, 0.125)
        changed = {name for name, value in after["revisions"].items() if before["revisions"][name] != value}
        assert changed == {"series", "timeline", "rollouts"}
        series = (await page.get("/api/metrics", names="reward,entropy"))["series"]
        assert series["reward"] == [[0, 1, 2], [0, 1 / 3, 0.125]]
        assert series["entropy"] == [[0, 1], [1.5, 1.5]]


async def test_metrics_that_were_written_again_are_read_again(run: Path) -> None:
    """When a run returns to a checkpoint, the file is shortened."""
    async with browser(run) as page:
        await page.enter()
        assert (await page.get("/api/state"))["runs"][0]["steps"] == 3
        with (run / "metrics.jsonl").open("r+") as file:
            file.truncate(len(file.readline()))
        assert (await page.get("/api/state"))["runs"][0]["steps"] == 1
        (run / "metrics.jsonl").unlink()
        assert (await page.get("/api/state"))["runs"][0]["steps"] == 0


async def test_file_that_shrank_and_grew_beyond_its_size_is_read_again(run: Path) -> None:
    """Between two requests: the inode is the same, and its size says nothing."""
    async with browser(run) as page:
        await page.enter()
        await page.get("/api/state")
        inode = (run / "metrics.jsonl").stat().st_ino
        metrics(run, 5, entropy=2.5)
        assert (run / "metrics.jsonl").stat().st_ino == inode
        assert (await page.get("/api/state"))["runs"][0]["steps"] == 5
        series = (await page.get("/api/metrics", names="entropy"))["series"]
        assert series["entropy"] == [[0, 1, 2, 3, 4], [2.5] * 5]


async def test_curves_of_other_evaluation_sets(run: Path) -> None:
    (run / "curve.csv").write_text("compute,reward\n0,0.5\n1,0.625\n")
    (run / "curve-hard.csv").write_text("compute,reward\n0,0.25\n1,0.375\n")
    (run / "curve-torn.csv").write_text("compute,rew")
    async with browser(run) as page:
        await page.enter()
        found = await page.get("/api/curve")
        assert [point[1] for point in found["points"]] == [0.5, 0.625]
        assert found["others"] == {"hard": [[0, 0.25, 0], [1, 0.375, 0]]}
        before = (await page.get("/api/state"))["runs"][0]["revisions"]["curve"]
        (run / "curve-easy.csv").write_text("compute,reward\n0,0.75\n")
        assert (await page.get("/api/state"))["runs"][0]["revisions"]["curve"] != before
        assert sorted((await page.get("/api/curve"))["others"]) == ["easy", "hard"]


def test_verifier_fails_since_the_step_at_which_it_began(tmp_path: Path) -> None:
    rows = [
        {"step": step, "rollouts": 100, "reward": 0.5, "grading_errors": 5 * (step == 2 or step >= 14)}
        for step in range(60)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Run(tmp_path).state()["health"] == "the verifier failed for 5% of the completions since step 15"


def test_timeline_waits_for_no_fit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Run(run)
    held: list[bool] = []

    def fit(path: Path) -> dict[str, Any]:
        held.append(shown._lock.locked())
        return {"points": [], "ends": {}}

    monkeypatch.setattr("scalerl_cli.page.runs.curve", fit)
    shown.state()
    shown.timeline(None, 12)
    assert held == [False]


async def test_long_series_keep_their_extremes(tmp_path: Path) -> None:
    metrics(tmp_path, 10_000, entropy=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines[4321] = json.dumps({"step": 4321, "entropy": 9.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    async with browser(tmp_path) as page:
        await page.enter()
        await page.get("/api/state")
        x, y = (await page.get("/api/metrics", names="entropy"))["series"]["entropy"]
        assert len(x) <= MAX_POINTS
        assert x == sorted(x)
        assert y[x.index(4321)] == 9.0


@pytest.mark.parametrize("evaluations", [0, 3, 400])
async def test_curve_of_any_number_of_evaluations(run: Path, evaluations: int) -> None:
    rows = "".join(f"{100 * at},{0.6 * at / (at + 30):.4f},256\n" for at in range(evaluations))
    (run / "curve.csv").write_text("compute,reward,samples\n" + rows)
    async with browser(run) as page:
        await page.enter()
        found = await page.get("/api/curve")
        assert len(found["points"]) == evaluations
        if evaluations < 400:
            assert found["problem"]
        else:
            assert found["forecast"]["low"] < found["forecast"]["high"]
            assert "wide" in found["why"][0]


async def test_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    metrics(other, 7)
    async with browser(run, other) as page:
        await page.enter()
        assert [one["steps"] for one in (await page.get("/api/state"))["runs"]] == [3, 7]
        assert "no rollouts" in (await page.get("/api/rollouts", run=1))["problem"]


def test_directories_that_are_no_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotARun, match="not the directory of a run"):
        Run(tmp_path)
    assert main(["view", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'none'}: no such directory\n"


def test_port_in_use_is_passed_over_or_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bound(0, 0) as used:
        port = used.getsockname()[1]
        with bound(None, port) as free:
            assert free.getsockname()[0] == "127.0.0.1"
            assert port < free.getsockname()[1] < port + 50
        assert main(["view", str(run), "--port", str(port)]) == 2
    assert f"port {port}: Address already in use" in capsys.readouterr().err


def test_run_file_of_another_release_names_the_run(run: Path) -> None:
    (run / "run.yaml").write_text("metadata: {name: old}\nspec: {gone: 1}\n")
    assert Run(run).name == "old"
    (run / "run.yaml").write_text(": [")
    assert Run(run).name == "run"


class Volume:
    """Files of a run on a cluster; ``cut``: bytes after which a connection ends."""

    def __init__(self, root: Path) -> None:
        self.root, self.cut = root, 2**30

    def list(self, paths: Sequence[str]) -> list[Entry]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        named = {str(path.relative_to(self.root)): path.stat().st_size for path in files}
        return [Entry(name, size) for name, size in named.items() if name.split("/")[0] in paths]

    def read(self, entry: Entry, offset: int) -> Iterator[bytes]:
        yield (self.root / entry.path).read_bytes()[offset : min(entry.size, offset + self.cut)]


def test_copy_of_a_run_on_a_cluster_follows_it(run: Path, tmp_path: Path) -> None:
    volume, copy = Volume(run), tmp_path / "copy"
    (run / "curve.csv").write_text("compute,reward\n")
    (run / "token").write_text("secret")

    def copied() -> dict[str, bytes]:
        update(volume, copy)
        found = [path for path in copy.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return {str(path.relative_to(copy)): path.read_bytes() for path in found}

    def wanted() -> dict[str, bytes]:
        found = [path for path in run.rglob("*") if path.is_file() and path.name != "token"]
        return {str(path.relative_to(run)): path.read_bytes() for path in found}

    assert copied() == wanted()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    (run / "curve.csv").write_text("compute,reward\n0,0.5\n")
    next((run / "rollouts").iterdir()).unlink()
    record(run, [{"step": 7}])
    assert copied() == wanted()
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    volume.cut = 5
    torn = record(run, [{"step": 8}])
    assert f"rollouts/{torn.name}" not in copied()
    volume.cut = 2**30
    assert copied() == wanted()
    metrics(run, 50)
    assert copied() == wanted(), "begun again, and grown beyond its former size"


def test_name_without_a_directory_is_a_run_on_a_cluster(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["view", "runs/none-1", "--kubeconfig", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("runs/none-1: no such directory; as a run on a cluster: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        (".venv/bin/scalerl", False, ".venv/bin/scalerl view runs/a"),
        ("/usr/bin/scalerl", True, "scalerl view runs/a"),
    ],
)
def test_run_names_the_command_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str, on_path: bool, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [called, "run", "run.yaml"])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if on_path else None)
    assert command("view", tmp_path / "runs/a") == shown


def traced_run(directory: Path) -> Path:
    """Two steps, and the evaluation of version 1, which ended 2 s into the wait of the second."""
    times = '"wait_seconds": 6.0, "forward_backward_seconds": 3.0, "optimizer_seconds": 1.0'
    rows = [f'{{"step": {at}, "wall_seconds": {10 * at + 10}, {times}}}\n' for at in range(2)]
    (directory / "metrics.jsonl").write_text("".join(rows))
    head = "compute,reward,samples,standard_error,version,wall_seconds,device_seconds,mean_tokens\n"
    (directory / "curve.csv").write_text(f"{head}1,0.5,64,0.1,1,12.0,1,4\n")
    group = '"kind": "group", "prompt": 0, "prompt_tokens": 1, "generator": "g", "lease_version": 1, "lengths": [3]'
    (directory / "trace.jsonl").write_text(f'{{{group}, "slot": 4, "step": 1, "leased": 12.5, "t": 15.5}}\n')
    return directory


def test_timeline_has_the_ends_of_evaluations(tmp_path: Path) -> None:
    run = Run(traced_run(tmp_path))
    run.state()
    why = {one["step"]: one["why"] for one in run.timeline(None, 5)["waits"]}
    assert why[1].startswith(
        "the evaluation of version 1, which generators sampled for its first 2.0 s; then "
    )


def test_perfetto_file_is_written_whole_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out" / "timeline.json"
    run = str(traced_run(tmp_path))
    to.parent.write_text("a file")
    assert main(["view", run, "--perfetto", str(to)]) == 2
    to.parent.unlink()
    assert main(["view", run, "--perfetto", str(to)]) == 0
    assert f"{to}: open it in Perfetto" in capsys.readouterr().out
    assert sum(event["ph"] == "X" for event in json.loads(to.read_text())["traceEvents"]) == 7
