"""Names of installed packages: what is found, what is refused, and what the messages say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scalerl_api.plugins import SchedulePlugin, free_value, problems
from scalerl_api.registry import Kind, PluginError, entry_point, installed, make
from scalerl_api.schedule import ScheduleSpec

CODE = """
from dataclasses import dataclass
from pydantic import BaseModel, Field
class Checked(BaseModel, extra="forbid"):
    size: int = Field(ge=1)
    def assign(self, inputs): ...
@dataclass
class Plain:
    first: object
    size: int = 3
    def assign(self, inputs): ...
def exits():
    raise SystemExit(0)
def another():
    return None
def fails(size=1):
    raise RuntimeError("no device")
no_function = 3
"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with schedules and losses, as pip leaves it."""
    (tmp_path / "own_kinds.py").write_text(CODE)
    (tmp_path / "own_end.py").write_text("raise SystemExit('no licence')")
    names = {
        "checked": "Checked",
        "plain": "Plain",
        "fails": "fails",
        "exits": "exits",
        "another": "another",
        "constant": "no_function",
        "gone": "Gone",
    }
    points = [f"{name} = own_kinds:{of}" for name, of in names.items()]
    write(
        tmp_path,
        "own",
        [
            "[scalerl.schedules]",
            *points,
            "builtin = builtins:dict",
            "missing = no_package_at_all:A",
            "ends = own_end:A",
        ],
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def write(folder: Path, name: str, lines: list[str]) -> None:
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_names_are_of_their_kind(package: Path) -> None:
    assert {"checked", "plain"} <= set(installed(Kind.SCHEDULE))
    assert "plain" not in installed(Kind.LOSS)
    with pytest.raises(PluginError, match=r"in the entry points scalerl\.losses"):
        entry_point(Kind.LOSS, "plain")


def test_what_a_name_makes(package: Path) -> None:
    assert make(Kind.SCHEDULE, "checked", {"size": 2}).size == 2
    made = make(Kind.SCHEDULE, "plain", {"size": 2}, "given")
    assert (made.first, made.size) == ("given", 2)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        (
            "chekced",
            {},
            r"did you mean 'checked'\? \(installed: .*checked, .*plain.*install it in this environment",
        ),
        ("checked", {"size": 0}, r"\(own_kinds:Checked\): parameters\.size: .*greater than or equal to 1"),
        ("checked", {"sizes": 2}, "parameters: .*'size.*it takes size"),
        ("plain", {"sizes": 2}, r"\(own_kinds:Plain\): parameters: .*'first'; it takes first, size"),
        ("fails", {}, r"\(own_kinds:fails\): RuntimeError: no device"),
        ("exits", {}, r"\(own_kinds:exits\): SystemExit: 0"),
        ("another", {}, r"\(own_kinds:another\): NoneType has no method assign; docs/plugins.md"),
        ("ends", {}, r"\(own_end:A\): SystemExit: no licence"),
        ("constant", {}, "its parameters are unknown: 3 is not a callable"),
        ("builtin", {}, r"\(builtins:dict\): its parameters are unknown: no signature found"),
        ("gone", {}, "has no attribute 'Gone'"),
        ("missing", {}, "No module named 'no_package_at_all'"),
    ],
)
def test_message_of_a_name_or_parameters_that_are_wrong(
    package: Path, name: str, parameters: dict[str, Any], says: str
) -> None:
    with pytest.raises(PluginError, match=says):
        make(Kind.SCHEDULE, name, parameters)
    spec = ScheduleSpec(plugin=SchedulePlugin(name=name, parameters=parameters))
    ((path, text),) = problems(spec, load=True)
    assert path == "spec.plugin"
    assert f"plugin {name!r}" in text


def test_name_of_two_packages(package: Path) -> None:
    write(package, "other", ["[scalerl.schedules]", "plain = own_kinds:fails"])
    with pytest.raises(
        PluginError, match=r"several packages have it.*own_kinds:Plain, own_kinds:fails; uninstall"
    ):
        entry_point(Kind.SCHEDULE, "plain")


def test_operator_reads_names_and_imports_nothing(package: Path) -> None:
    assert problems(ScheduleSpec(plugin=SchedulePlugin(name="missing"))) == []
    assert "own_kinds" not in sys.modules


def test_kinds_that_are_not_asked_for_are_not_checked() -> None:
    spec = ScheduleSpec(plugin=SchedulePlugin(name="none"))
    assert problems(spec, (Kind.LOSS,), load=True) == []
    assert len(problems(spec, (Kind.SCHEDULE,))) == 1


@given(st.dictionaries(st.text(), VALUES))
def test_parameters_are_any_json_without_floats(parameters: dict[str, Any]) -> None:
    assert free_value(parameters) == json.loads(json.dumps(parameters))


def test_depth_is_limited() -> None:
    """Deeper ones would end validation with a RecursionError."""

    def nested(levels: int) -> Any:
        value: Any = 1
        for level in range(levels):
            value = [value] if level % 2 else {"a": value}
        return value

    assert free_value(nested(32)) == nested(32)
    for levels in (33, 500, 5000):
        with pytest.raises(ValueError, match="nested deeper than 32 levels; make it flatter"):
            free_value(nested(levels))
    with pytest.raises(ValidationError, match="nested deeper than 32 levels"):
        SchedulePlugin(name="a", parameters={"deep": nested(500)})


@given(VALUES, st.floats() | st.binary() | st.tuples())
def test_other_values_are_refused_at_any_depth(value: Any, bad: Any) -> None:
    for wrong in ([value, bad], {"a": [{"b": bad}], "c": value}):
        with pytest.raises(ValueError, match=r"floats are not allowed|must be made of"):
            free_value(wrong)
