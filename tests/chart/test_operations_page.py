"""docs/operations.md: its tables are the code's, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml
from charts import snapshots
from find_metrics import registered
from queries import CHART, DASHBOARDS, ROOT
from roles import granted

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.load import load_run
from scalerl_api.reasons import Reason
from scalerl_cli.main import parser
from scalerl_lifecycle.role_containers import plan
from scalerl_operator import names

PAGE = (ROOT / "docs" / "operations.md").read_text()
WRITTEN = re.sub(r"<!-- (?:phases|conditions|reasons|edits|alerts): .*?<!-- end -->", "", PAGE, flags=re.S)
"""Without the tables that `make docs` makes."""
KUBERNETES = {
    "Advisory",
    "Auto",
    "Delete",
    "False",
    "ReadWriteMany",
    "ReadOnlyMany",
    "ReadWriteOnce",
    "Terminating",
    *("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload", "AbortIncompleteMultipartUpload"),
}
"""Words with a capital letter that are neither a condition nor a reason: values of fields, actions of S3."""


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#{1,6} (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_generated_tables_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "tables.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_every_phase_condition_and_reason_is_explained():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M)
    for constant in (*Phase, *Reason):
        assert (constant.value, constant.text) in rows
    for type_ in ConditionType:
        assert type_.todo.endswith(".")
        assert (type_.value, f"{type_.text} | {type_.todo}") in rows


def test_every_reason_is_used():
    members = ("operator", "lifecycle", "autoscaling")
    source = "".join(path.read_text() for member in members for path in (ROOT / member / "src").rglob("*.py"))
    source += (ROOT / "api/src/scalerl_api/reasons.py").read_text().replace("cls.", "Reason.")
    for constants in (Phase, ConditionType, Reason):
        for name in constants.__members__:
            assert re.search(rf"\b{constants.__name__}\.{name}\b", source), name


def test_links_resolve():
    links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", PAGE)
    assert links
    for text, target in links:
        name, _, anchor = target.partition("#")
        path = ROOT / "docs" / name if name else ROOT / "docs" / "operations.md"
        assert path.is_file(), text
        if anchor:
            assert anchor in anchors(path.read_text()), f"{text}: {target}"


def test_values_that_it_names_exist():
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    roots = "|".join(defaults)
    named = set(re.findall(r"--set ([\w.]+)=", PAGE))
    named |= set(re.findall(rf"`((?:{roots})\.[\w.]+)(?:=\w+)?`", PAGE)) - {"metrics.jsonl"}  # a file
    assert len(named) >= 12
    spec_too = {"generator", "images", "recipe", "trainer"}
    for path in named:
        value = defaults
        for key in path.split("."):
            if key not in value and (value == {} or path.split(".")[0] in spec_too):
                break  # labels are the user's; the others are fields of a run's spec
            assert key in value, path
            value = value[key]


def test_no_upgrade_keeps_an_older_charts_defaults():
    """With ``--reuse-values`` a value that a release has added is missing."""
    for path in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *CHART.rglob("*.txt")):
        commands = re.findall(r"^ *helm upgrade .*(?:\\\n.*)*", path.read_text(), re.M)
        assert not [said for said in commands if "--reuse-values" in said], path
    upgrades = re.findall(r"^helm upgrade (.*)$", PAGE, re.M)
    assert len(upgrades) >= 3
    assert all("--reset-then-reuse-values" in said for said in upgrades)


def test_fields_of_the_spec_that_it_names_exist():
    definition = yaml.safe_load((ROOT / "crds" / "scalerl.dev_scalerlruns.yaml").read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    roots = "|".join(spec["properties"])
    named = set(re.findall(rf"`spec\.((?:{roots})(?:\.[a-zA-Z]+)*)`", PAGE))
    named |= set(re.findall(rf"`((?:{roots})(?:\.[a-zA-Z]+)+)`", PAGE)) - {"trace.jsonl"}  # a file
    assert len(named) >= 15
    for path in named:
        node = spec
        for key in path.split("."):
            assert key in node.get("properties", {}), path
            node = node["properties"][key]


def test_table_of_permissions_is_the_role():
    section = PAGE.partition("## Permissions")[2].partition("\n## ")[0]
    said = {}
    for resources, verbs in re.findall(r"^\| (`.+?) \| (.+?) \| .* \|$", section, re.M):
        parts = [re.findall(r"[a-z]+", re.sub(r"\(.*?\)", "", part)) for part in verbs.split(";")]
        for index, resource in enumerate(re.findall(r"`([a-z/]+)`", resources)):
            whole = f"scalerlruns{resource}" if resource.startswith("/") else resource
            said[whole] = set(parts[min(index, len(parts) - 1)])
    roles = [
        role
        for role in snapshots()["default"]
        if role["kind"] in ("Role", "ClusterRole")
        and not any("aggregate-to" in label for label in role["metadata"]["labels"])
    ]
    assert said == {resource: verbs for (_, resource), verbs in granted(roles).items()}


def test_conditions_and_reasons_that_it_names_exist():
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)(?:=\w+)?`", WRITTEN))
    assert len(named) >= 30
    assert named - {*Phase, *ConditionType, *Reason} <= KUBERNETES


def test_fields_of_the_status_that_it_names_exist():
    definition = yaml.safe_load((ROOT / "crds" / "scalerl.dev_scalerlruns.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    named = set(re.findall(r"`status\.([a-zA-Z.]+)`", PAGE))
    assert len(named) >= 5
    for path in named:
        node = schema["status"]
        for key in path.split("."):
            assert key in node.get("properties", {}), path
            node = node["properties"][key]


def test_metrics_panels_and_labels_that_it_names_exist():
    metrics = set(re.findall(r"\b(scalerl_(?:coordinator|trainer|actor|operator|curvefit)_\w+)\{", PAGE))
    assert metrics
    assert metrics <= {sample for metric in registered() for sample in metric.samples}
    panels = re.findall(r"panel \*(.+?)\*", PAGE)
    assert len(panels) == 3
    titles = {panel["title"] for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]}
    assert set(panels) <= titles
    known = {value for value in vars(names).values() if isinstance(value, str)}
    assert set(re.findall(r"scalerl\.dev/[a-z-]+", PAGE)) <= known


def test_containers_that_its_commands_name_exist():
    (chart,) = (obj for obj in snapshots()["default"] if obj["kind"] == "Deployment")
    there = {container["name"] for container in chart["spec"]["template"]["spec"]["containers"]}
    run = load_run(ROOT / "examples" / "tiny" / "run.yaml")
    there |= {container.name for workload in plan(run).workloads for container in workload.containers}
    named = set(re.findall(r"kubectl [^`\n]* -c ([a-z]+)", PAGE))
    assert len(named) >= 5
    assert named <= there


def test_commands_of_this_project_that_it_names_exist(capsys):
    targets = set(re.findall(r"^([a-z-]+):.* ##", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", PAGE, re.M)) <= targets
    for command in set(re.findall(r"`scalerl ([a-z]+)", PAGE)):
        with pytest.raises(SystemExit) as ended:
            parser().parse_args([command, "--help"])
        assert ended.value.code == 0, command
    assert (ROOT / "trainer/src/scalerl_trainer/export.py").is_file()
    assert "python -m scalerl_trainer.export" in PAGE
