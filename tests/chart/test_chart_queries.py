"""Dashboards and alerts ask only for what some process measures, and the committed dashboards are what the code makes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from find_metrics import registered
from promql import NotUnderstood, grouped_labels, selectors
from queries import ALERTS, CHART, DASHBOARDS, ROOT, alerts, dashboards, rules

from scalerl_api import wire

# Set by the scrape (the chart's ServiceMonitor and PodMonitor), not by a process.
TARGET_LABELS = {"namespace", "run", "role", "pod", "job", "instance", "container"}
FROM_PROMETHEUS = {"up": frozenset[str]()}

KNOWN = {sample: metric.labels for metric in registered() for sample in metric.samples}
HISTOGRAMS = {metric.name for metric in registered() if metric.kind == "histogram"}
ALL = [*dashboards(), *alerts()]


@pytest.mark.parametrize("asked", ALL, ids=lambda asked: asked.where)
def test_every_query_reads_what_exists(asked):
    read = selectors(asked.expr)
    assert read, asked.expr
    available = set(TARGET_LABELS)
    for selector in read:
        known = KNOWN | FROM_PROMETHEUS
        assert selector.metric in known, f"{selector.metric} is not measured: {asked.expr}"
        own = set(known[selector.metric]) | TARGET_LABELS
        if selector.metric.endswith("_bucket"):
            own.add("le")
        assert selector.labels <= own, f"{selector.labels - own} of {selector.metric}: {asked.expr}"
        available |= own
    assert grouped_labels(asked.expr) <= available, asked.expr


@pytest.mark.parametrize("asked", ALL, ids=lambda asked: asked.where)
def test_counters_are_queried_by_rate_and_gauges_are_not(asked):
    kinds = {sample: metric.kind for metric in registered() for sample in metric.samples}
    for function, metric in re.findall(r"\b(rate|increase|irate)\(\s*([a-z_]+)", asked.expr):
        assert kinds[metric] in ("counter", "histogram"), (
            f"{function} of {metric}, which is a {kinds[metric]}"
        )


def test_phases_that_queries_name_exist():
    for asked in ALL:
        for selector in selectors(asked.expr):
            for label, operator, value in selector.matchers:
                if selector.metric == "scalerl_coordinator_phase" and label == "phase":
                    assert operator == "="
                    assert wire.Phase(value)


def test_step_statistics_in_queries_exist_in_the_trainer():
    source = "".join(
        (ROOT / "trainer/src/scalerl_trainer" / name).read_text()
        for name in (
            "leader.py",
            "publishes.py",
            "step_stats.py",
            "shard_conversion.py",
            "algo/kl.py",
            "algo/distillation.py",
        )
    )
    for asked in ALL:
        for selector in selectors(asked.expr):
            names = [value for label, _, value in selector.matchers if label == "name"]
            assert all(f'"{name}"' in source for name in names), asked


def test_query_parser_reports_unknown_syntax():
    assert [
        s.metric for s in selectors('histogram_quantile(0.9, sum by (le) (rate(x_bucket{a="b,c"}[5m])))')
    ] == ["x_bucket"]
    assert [s.metric for s in selectors("count(a == 1) or vector(0)")] == ["a"]
    for wrong in ("sum(rate(a[5m])", "a{b}", "a{b=c}"):
        with pytest.raises(NotUnderstood):
            selectors(wrong)


def test_dashboards_are_what_the_code_makes(tmp_path):
    subprocess.run(
        [sys.executable, str(ROOT / "charts" / "dashboards"), "--out", str(tmp_path)], check=True, timeout=200
    )
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS}, "run `make dashboards`"


def test_dashboards_are_whole():
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert {board["uid"] for board in boards} == {"scalerl-fleet", "scalerl-run", "scalerl-operator"}
    for board in boards:
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(numbers) == len(set(numbers))
        assert board["panels"][0]["type"] == "row"
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, f"{board['title']}: {panel['title']} lies on another panel"
            taken |= cells
            if panel["type"] != "row":
                assert panel["description"].endswith(".")
                assert panel["datasource"]["uid"] == "${datasource}"
                assert "refId" in panel["targets"][0]


def test_dashboards_link_to_each_other():
    uids = {json.loads(path.read_text())["uid"] for path in DASHBOARDS}
    for path in DASHBOARDS:
        links = {link["url"].removeprefix("/d/") for link in json.loads(path.read_text())["links"]}
        assert links == uids - {json.loads(path.read_text())["uid"]}


def test_alerts_have_summary_and_severity():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["alert"].startswith("ScaleRL")
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+(s|m|h)", rule["for"])
        assert set(rule["annotations"]) == {"summary", "description"}
        for text in rule["annotations"].values():
            assert text == " ".join(text.split())
            assert text.endswith(".")


def test_every_alert_has_a_runbook():
    page = (ROOT / "docs" / "operations.md").read_text()
    headings = re.findall(r"^### (ScaleRL\w+)$", page, re.M)
    assert sorted(headings) == sorted(rule["alert"] for rule in rules())


def test_alerts_file_is_the_chart_file():
    assert Path(CHART, "files", "alerts.yaml") == ALERTS
    assert 'Files.Get "files/alerts.yaml"' in (CHART / "templates" / "rules.yaml").read_text()
