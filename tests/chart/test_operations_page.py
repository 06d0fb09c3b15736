"""docs/operations.md: its tables are the code's, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys

import yaml
from queries import CHART, ROOT

from scalerl_api.conditions import ConditionType, Phase, Reason

PAGE = (ROOT / "docs" / "operations.md").read_text()


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#{1,6} (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_its_tables_are_what_the_code_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "tables.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_every_phase_condition_and_reason_is_explained():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M)
    for constant in (*Phase, *Reason):
        assert (constant.value, constant.text) in rows
    for type_ in ConditionType:
        assert type_.todo.endswith(".")
        assert (type_.value, f"{type_.text} | {type_.todo}") in rows


def test_there_is_no_reason_that_nobody_ever_gives():
    source = "".join(path.read_text() for path in (ROOT / "operator" / "src").rglob("*.py"))
    source += (ROOT / "api/src/scalerl_api/conditions.py").read_text().replace("cls.", "Reason.")
    for constants in (Phase, ConditionType, Reason):
        for name in constants.__members__:
            assert re.search(rf"\b{constants.__name__}\.{name}\b", source), name


def test_every_link_leads_somewhere():
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
    named |= set(re.findall(rf"`((?:{roots})\.[\w.]+)(?:=\w+)?`", PAGE))
    assert len(named) >= 12
    spec_too = {"generator", "images", "trainer"}
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
    named |= set(re.findall(rf"`((?:{roots})(?:\.[a-zA-Z]+)+)`", PAGE))
    assert len(named) >= 15
    for path in named:
        node = spec
        for key in path.split("."):
            assert key in node.get("properties", {}), path
            node = node["properties"][key]
