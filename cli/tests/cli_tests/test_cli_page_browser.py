"""The page in a real browser: what a reader does, and completions that attack it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import chromium
import numpy as np
import pytest
from recorded_rollouts import record

from cli_tests.test_cli_page import Browser, browser

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(chromium.BINARY is None, reason="needs Chromium"),
    pytest.mark.timeout(900),
]

HOSTILE = (
    "</script><script>window.owned=1</script><img src=x onerror='window.owned=1'><svg onload='window.owned=1'>"
    "<base href='//evil.example/'><style>*{display:none}</style>${owned}{{owned}}\x1b[2J\u202eevil"
)
VIEWS = ("curve", "metrics", "rollouts", "prompt", "timeline", "decisions")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with 40 steps, 12 evaluations, decisions, and texts that attack a page in every place that shows text."""
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {
            "step": at,
            "reward": 0.2 + at / 100,
            "entropy": 1.0,
            "wall_seconds": 10.0 * (at + 1),
            "wait_seconds": 4 + at / 100,
        }
        | {
            "forward_backward_seconds": 4.0,
            "optimizer_seconds": 1.0,
            "busy_seconds": 5.0,
            "mean_completion_tokens": 9.0,
        }
        for at in range(40)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = "".join(f"{100 * at},{0.6 * at / (at + 4):.4f},256\n" for at in range(12))
    (run / "curve.csv").write_text("compute,reward,samples\n" + points)
    (run / "run.yaml").write_text(json.dumps({"metadata": {"name": HOSTILE[:60]}}))
    decision = {"state": HOSTILE, "reasons": [HOSTILE], "advice": [], "action": {"kind": HOSTILE}}
    line = {"sequence": 0, "time": "2026-01-01T00:00:00", "policy": "autoscale", "decision": decision}
    (run / "decisions.jsonl").write_text(json.dumps(line) + "\n")
    group = {
        "kind": "group",
        "t": 395.0,
        "slot": 0,
        "step": 39,
        "prompt": 0,
        "generator": HOSTILE,
        "leased": 380.0,
        "lengths": [3],
    }
    (run / "trace.jsonl").write_text(json.dumps(group | {"prompt_tokens": 1}) + "\n")
    attacks = {
        "prompt": HOSTILE,
        "completion": HOSTILE,
        "reference": HOSTILE,
        "error": HOSTILE,
        "task": HOSTILE,
    }
    attacks |= {
        "labels": [(HOSTILE, HOSTILE)],
        "parts": [(HOSTILE, 1.0)],
        "excluded": HOSTILE,
        "prompt_id": HOSTILE,
    }
    record(run, [{"step": 39, "reward": 1.0} | attacks])
    for step in (0, 10):
        record(
            run,
            [
                {
                    "step": step,
                    "split": "held_out",
                    "sample": at,
                    "reward": at / 8,
                    "completion": f"answer {at} of version {step}",
                }
                for at in range(8)
            ],
        )
    return run


async def entered(page: Browser, tab: chromium.Tab) -> None:
    await tab.open(f"{page.address}/?token={page.server.token}")
    await tab.until("location.search === '' && document.querySelector('figure svg path')")


async def shown(tab: chromium.Tab, view: str, wanted: str) -> None:
    """Open a view, and wait for ``wanted``, a JavaScript expression."""
    await tab.run(f"location.hash = {'#' + view!r}")
    await tab.until(
        f"document.querySelector('nav [aria-current]').hash === {'#' + view.split('?')[0]!r} && ({wanted})"
    )


async def test_hostile_texts_are_shown_as_text(run: Path) -> None:
    visible = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        await shown(tab, "rollouts?split=train", "document.querySelector('article')")
        assert visible in await tab.text("article .text:not(.prompt)")
        await tab.run("document.querySelector('article button').click()")
        await tab.until("document.querySelectorAll('article .box').length === 4")
        assert (await tab.text("article")).count(visible) >= 4
        await tab.run("document.querySelector('article a').click()")
        await tab.until("document.querySelector('.two article')")
        await shown(tab, "decisions", "document.querySelector('td li')")
        assert "<script>" in await tab.text("td li")
        await shown(tab, "timeline", "document.querySelector('table')")
        assert "<script>" in await tab.text("tbody")
        assert await tab.run("window.owned") is None
        assert (
            await tab.run(
                "document.querySelectorAll('main script, main img, main style, base, header img').length"
            )
            == 0
        )
        assert tab.problems == []


async def test_address_and_history_have_no_token(run: Path) -> None:
    async with browser(run) as page, chromium.tab() as tab:
        token = page.server.token
        await entered(page, tab)
        history = await tab.call("Page.getNavigationHistory")
        assert token not in json.dumps([entry["url"] for entry in history["entries"][-1:]])
        assert await tab.run("document.referrer + document.cookie + location.href") == f"{page.address}/"
        await tab.call("Page.reload")
        await tab.until("document.querySelector('figure svg path')")
        assert await tab.run("fetch('http://localhost:1/').then(() => 'read', () => 'refused')") == "refused"


async def test_reader_finds_the_worst_and_compares_versions(run: Path) -> None:
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        assert "wide" in await tab.text("details li")
        await tab.run(
            "[...document.querySelectorAll('a')].find((one) => one.textContent.includes('worst')).click()"
        )
        await tab.until("document.querySelectorAll('article').length === 8")
        assert "answer 0 of version 10" in await tab.text("article")
        await tab.run("document.querySelector('article a').click()")
        await tab.until("document.querySelectorAll('.two article').length === 16")
        assert "answer 0 of version 0" in await tab.text(".two > :first-child")
        assert "answer 0 of version 10" in await tab.text(".two > :last-child")
        assert tab.problems == []


async def test_equal_rewards_are_in_a_stated_order(run: Path) -> None:
    record(
        run,
        [
            {"step": 60, "split": "held_out", "prompt_id": f"p{at // 4}", "sample": at % 4, "reward": 0.0}
            for at in range(40)
        ],
    )
    heads = "[...document.querySelectorAll('article .head')].map((one) => one.innerText.match(/prompt (\\w+)[^]*completion (\\d)/).slice(1).join(' '))"
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        await shown(
            tab,
            "rollouts?split=held-out&step=last&sort=reward",
            "document.querySelectorAll('article').length === 25",
        )
        assert await tab.run(heads) == [f"p{at // 4} {at % 4}" for at in range(25)]
        assert (
            "Sorted by reward, the lowest first; equal ones by step, prompt and completion"
            in await tab.text("[role=status]")
        )
        await tab.run(
            "[...document.querySelectorAll('button')].find((one) => one.textContent === 'next').click()"
        )
        await tab.until("document.querySelectorAll('article').length === 15")
        assert await tab.run(heads) == [f"p{at // 4} {at % 4}" for at in range(25, 40)]


async def test_axes_have_titles(run: Path) -> None:
    titles = "[...document.querySelectorAll('figure')].map((one) => [...one.querySelectorAll('svg .title')].map((text) => text.textContent))"
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        assert await tab.run(titles) == [["reward", "compute"]]
        await shown(tab, "metrics", "document.querySelectorAll('figure svg path').length > 3")
        found = await tab.run(titles)
        assert found[:3] == [["reward", "step"], ["tokens", "step"], ["nats", "step"]]
        assert all(len(one) == 2 and "undefined" not in one for one in found)
        await shown(tab, "prompt", "document.querySelector('figure svg .title')")
        assert await tab.run(titles) == [["reward", "version"]]
        assert "version, left" in await tab.text("main")
        await shown(tab, "timeline", "document.querySelector('figure svg .title')")
        assert await tab.run(titles) == [["seconds since the start of the run"]]


async def test_phases_have_colours_of_their_own(run: Path) -> None:
    rows = [
        {"step": at, "wall_seconds": 40.0 * (at + 1), "trainer_busy_fraction": 0.4}
        | {"forward_backward_seconds": 5.0, "optimizer_seconds": 3.0, "busy_seconds": 8.0}
        | {"shard_seconds": 3.0, "wait_seconds": 4.0 if at else 13.0, "publish_wait_seconds": 3.0}
        | {"checkpoint_seconds": 2.0, "export_seconds": 2.0}
        for at in range(3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    colours = "(() => { const found = {}; for (const bar of document.querySelectorAll('svg rect')) found[bar.textContent.replace(/^step -?\\d+: |, [\\d.]+ s$/g, '').split(':')[0]] = getComputedStyle(bar).fill; return found; })()"
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        for dark in (False, True):
            await tab.screenshot(1280, 700, dark=dark)
            await shown(tab, "timeline", "document.querySelector('svg rect')")
            found = await tab.run(colours)
            phases = {"forward, backward", "optimizer", "fetch", "wait", "publish", "checkpoint", "export"}
            assert set(found) == phases | {"start", "warm start", "lost step", "other"}
            assert len(set(found.values())) == len(found), found
        assert "other: between two phases" in await tab.text("main")


async def test_curves_of_other_sets_have_a_chart(run: Path) -> None:
    (run / f"curve-{HOSTILE[:9].replace('/', '')}.csv").write_text("compute,reward\n0,0.25\n100,0.5\n")
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        assert await tab.run("document.querySelectorAll('figure').length") == 2
        assert "<script" in await tab.text("figure:nth-of-type(2) .legend")
        assert tab.problems == []


async def test_page_is_live_and_says_when_its_server_is_gone(run: Path) -> None:
    async with chromium.tab() as tab:
        async with browser(run) as page:
            await entered(page, tab)
            await shown(tab, "metrics", "document.querySelectorAll('figure').length > 3")
            await tab.run("document.querySelector('main').dataset.kept = 'yes'")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 40, "reward": 0.75}) + "\n")
            await tab.until(
                "document.querySelector('#runs').textContent.includes('reward in training 0.750')"
            )
            assert await tab.run("document.querySelector('main').dataset.kept") == "yes"
        await tab.until("!document.querySelector('#lost').hidden")


async def test_views_fit_narrow_screens_and_keys_work(run: Path) -> None:
    async with browser(run, run) as page, chromium.tab() as tab:
        await entered(page, tab)
        await tab.size(390, 844)
        for view in VIEWS:
            await shown(tab, view, "!document.querySelector('main').textContent.includes('Reading …')")
            assert await tab.run("document.documentElement.scrollWidth") <= 390, view
        await shown(tab, "curve", "document.querySelector('figure svg path')")
        await tab.run("document.querySelector('figure svg').focus()")
        await tab.key("ArrowLeft")
        assert "compute" in await tab.text(".legend em")
        await tab.run("document.querySelector('nav a').focus()")
        await tab.key("Tab")
        assert await tab.run("document.activeElement.textContent") == "Metrics"


async def test_completion_is_coloured_by_its_tokens(run: Path) -> None:
    pieces = ["so", " it", " is", "<img src=x onerror='window.owned=1'>", ""]
    row = {
        "step": 50,
        "completion": "".join(pieces),
        "token_ends": np.cumsum([len(piece) for piece in pieces]).tolist(),
        "token_versions": [3, 3, -1, 4, 4],
        "token_logprob_differences": [0.001, 0.5, math.nan, -2.5, 0.0],
    }
    record(run, [row])
    spans = "[...document.querySelectorAll('article .box .chip')].map((one) => [one.textContent, one.title, one.className])"
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        await shown(tab, "rollouts?step=50", "document.querySelector('article')")
        await tab.run("document.querySelector('article button').click()")
        await tab.until("document.querySelector('article .box .chip')")
        assert await tab.run(spans) == [
            ["so it", "tokens 0 to 1: version 3", "chip t0"],
            [" is", "token 2: not sampled", "chip t6"],
            ["".join(pieces[3:]), "tokens 3 to 4: version 4", "chip t1"],
        ]
        choose = "(by) => { const one = document.querySelector('article select'); one.value = by; one.dispatchEvent(new Event('change')); }"
        await tab.run(f"({choose})('difference')")
        assert await tab.run(spans) == [
            [" it", "token 1: +0.5 nats", "chip t0"],
            [pieces[3], "token 3: -2.5 nats", "chip t1"],
        ]
        assert (await tab.text("article .box:has(.chip)")) == row["completion"]
        await tab.run(f"({choose})('nothing')")
        assert await tab.run(spans) == []
        assert await tab.run("window.owned") is None
        assert tab.problems == []


async def test_completion_of_100_000_tokens_opens(run: Path) -> None:
    tokens = {
        "token_ends": list(range(10, 1_000_001, 10)),
        "token_versions": [at // 5000 for at in range(100_000)],
        "token_logprob_differences": [0.3 * (at % 3) for at in range(100_000)],
    }
    record(run, [{"step": 50, "completion": "long word " * 100_000, "tokens": 100_000} | tokens])
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        await shown(tab, "rollouts?step=50", "document.querySelector('article')")
        assert await tab.run("document.querySelector('article').textContent.length") < 3000
        await tab.run("document.querySelector('article button').click()")
        await tab.until("document.querySelector('article').textContent.length > 1000000")


async def test_prompt_of_which_the_middle_is_left_out_shows_its_end(run: Path) -> None:
    record(run, [{"step": 50, "prompt": "given " * 500 + "the question"}])
    async with browser(run) as page, chromium.tab() as tab:
        await entered(page, tab)
        await shown(tab, "rollouts?step=50", "document.querySelector('article')")
        assert (await tab.text("article .prompt")).endswith("the question")
        assert "characters" in await tab.text("article .prompt")
        await shown(
            tab, "prompt?prompt=p0&task=main&split=train&from=50&to=50", "document.querySelector('.two')"
        )
        assert (await tab.text("main .text.box")).endswith("the question")
        await shown(tab, "curve", "document.querySelector('figure svg path')")
        await tab.run("location.hash = '#constructor'")
        await tab.until("document.querySelector('nav [aria-current]').hash === '#curve'")
        assert tab.problems == []
