"""Prometheus' own judgement: alerts are rules, they fire when they should, and every query is one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from charts import render
from queries import ALERTS, concrete, dashboards, rules

pytestmark = pytest.mark.cluster
TESTS = Path(__file__).with_name("alerts_test.yaml")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_are_rules(promtool):
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", str(ALERTS))


def test_promtool_accepts_rules_rendered_by_the_chart(promtool, helm, tmp_path):
    objects = render(helm, "--set", "metrics.rules.enabled=true")
    (made,) = (obj for obj in objects if obj["kind"] == "PrometheusRule")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(made["spec"]))
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", str(file))


def test_alerts_fire_as_expected(promtool):
    run(promtool, "test", "rules", str(TESTS))


def test_each_alert_fires_and_stays_silent():
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in cases} == names
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    # Silent: before its time, or for a series beside the one that fires.
    for name in names:
        quiet = [case for case in cases if case["alertname"] == name and not case.get("exp_alerts")]
        beside = [
            t
            for t in tests
            if any(c["alertname"] == name for c in t["alert_rule_test"]) and len(t["input_series"]) > 1
        ]
        assert quiet or beside, name


def test_every_query_of_the_dashboards_is_promql(promtool, tmp_path):
    asked = dashboards()
    file = tmp_path / "queries.yaml"
    queries = [
        {"record": f"query:number_{n}", "expr": concrete(query.expr, namespace="n", run="r")}
        for n, query in enumerate(asked)
    ]
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": queries}]}))
    run(promtool, "check", "rules", "--lint=none", str(file))
