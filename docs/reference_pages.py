"""The pages of docs/reference, from the custom resource definition and from the processes' own metric registries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from find_metrics import Registered, registered

from scalerl_api import crd
from scalerl_api.metrics_fields import RUN_FIGURES, STEP_FIGURES, TRAINER_FIGURES
from scalerl_api.spec import RunSpec
from scalerl_api.vllm_options import GROUPS, VLLM_RELEASE, Use

_NOTE = "<!-- Written by `make docs`; changes here are lost. -->\n\n"
_EXPORTERS = {
    "scalerl_operator_": "operator",
    "scalerl_coordinator_": "coordinator",
    "scalerl_trainer_": "trainer",
    "scalerl_generator_": "generator",
    "scalerl_actor_": "actor",
    "scalerl_curvefit_": "curve-fit sidecar",
}


def spec_page() -> str:
    """Every field of a ScaleRLRun's spec."""
    spec = crd.schema_of(RunSpec)  # the definition describes repeated sections once
    lines = [
        "# Spec of a run\n\n" + _NOTE,
        "All fields of `spec`, as in `kubectl explain scalerlrun.spec --recursive`. A decimal is a string with quotes. What an edit\n"
        "of a field does to a run under way: [What an edit does](../operations.md#what-an-edit-does).\n",
    ]
    top = {name: field for name, field in spec["properties"].items() if "properties" not in field}
    lines += _section("spec", top, spec.get("required", ()))
    for name, field in spec["properties"].items():
        if "properties" in field:
            lines.append(f"\n## {name}\n\n{field['description']}\n")
            lines += _section(name, field["properties"], field.get("required", ()))
    return "\n".join(lines) + "\n"


def _section(where: str, fields: dict[str, Any], required: Any) -> list[str]:
    rows = [
        f"| `{path}` | {_type(field)} | {_default(field, needed)} | {_cell(field)} |"
        for path, field, needed in _fields("" if where == "spec" else f"{where}.", fields, required)
    ]
    return ["\n| field | type | default | |", "| --- | --- | --- | --- |", *rows] if rows else []


def _fields(prefix: str, fields: dict[str, Any], required: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
    for name, field in fields.items():
        path, inner, suffix = f"{prefix}{name}", field, ""
        if field.get("type") == "array":
            inner, suffix = field["items"], "[]"
        yield path, field, name in required
        yield from _fields(f"{path}{suffix}.", inner.get("properties", {}), inner.get("required", ()))


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "number or string"
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object" and "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'])}"
    return str(field.get("type", "any"))


def _default(field: dict[str, Any], needed: bool) -> str:
    if needed:
        return "required"
    default = field.get("default")
    return "" if default in (None, {}) else f"`{default}`"


def _cell(field: dict[str, Any]) -> str:
    bounds = [f"at least {field['minimum']}"] if "minimum" in field else []
    bounds += [f"at most {field['maximum']}"] if "maximum" in field else []
    said = field.get("description", "")
    rules = dict.fromkeys(rule["message"] for rule in field.get("x-kubernetes-validations", ()))
    text = " ".join([said, *([f"({', '.join(bounds)})"] if bounds else []), *(f"*{rule}*" for rule in rules)])
    return text.replace("|", "\\|").replace("\n", " ").strip()


def metrics_page() -> str:
    """Every metric, by the process that exports it."""
    lines = [
        "# Metrics\n\n"
        + _NOTE
        + "By the process that exports them; a histogram has `_bucket`, `_sum` and `_count`.\n"
    ]
    found = registered()
    for prefix, exporter in _EXPORTERS.items():
        mine = sorted((m for m in found if m.name.startswith(prefix)), key=lambda metric: metric.name)
        if mine:
            lines += [
                f"\n## {exporter.capitalize()}\n",
                "| metric | type | labels | |",
                "| --- | --- | --- | --- |",
            ]
            lines += [_metric(metric) for metric in mine]
    lines += [
        "\n## metrics.jsonl\n\nFields of a line, which the trackers have too; those of the coordinator's `task` metrics have no prefix, "
        "and of\neach task of a mix the suffix `_task_NAME`. KL and tokens of a mismatch have a suffix for a range "
        "of positions, like `sampled_kl_256_1k`.\n`reward_part_NAME` is the mean of a part of the verdicts, and `ratio_NAME_fraction` what a loss of "
        "a package counts, per trained token.\n",
        "| field | |",
        "| --- | --- |",
        *(
            f"| `{name}` | {text}. |"
            for name, text in {**RUN_FIGURES, **STEP_FIGURES, **TRAINER_FIGURES}.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _metric(metric: Registered) -> str:
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in sorted(metric.labels))
    text = metric.help.replace("|", "\\|").replace("\n", " ")
    return f"| `{name}` | {metric.kind} | {labels} | {text} |"


def vllm_page() -> str:
    """Every option of vLLM's server, by what a run does with it."""
    lines = [
        "# Options of vLLM\n\n" + _NOTE,
        "What `generator.extraArgs` does with each option of vLLM's server "
        f"{VLLM_RELEASE}. Options are written in full: an abbreviation is refused,\nthough vLLM's own parser would accept it. "
        "Underscores and fields of JSON options (`--compilation-config.mode=3`) are accepted. A value\nthat begins with `-` is "
        "written as `--option=value`. `scalerl validate`, the API server and the start of the generator's server apply\nthe same table.\n",
    ]
    for use in Use:
        lines += [f"\n## {use.capitalize()}\n", "| options | |", "| --- | --- |"]
        for group in GROUPS:
            if group.use is use:
                options = ", ".join(f"`{option}`" for option in group.written.split())
                lines.append(f"| {options} | {group.effect} |")
    return "\n".join(lines) + "\n"


PAGES = {"spec.md": spec_page, "metrics.md": metrics_page, "vllm-options.md": vllm_page}
"""Files of docs/reference, and what writes each."""
