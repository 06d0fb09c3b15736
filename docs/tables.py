"""`python docs/tables.py [--check]`: write what the pages take from the code: tables of docs/operations.md,
docs/recipe.md and docs/models.md, docs/reference."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import reference_pages
import yaml

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.edits import EDITS
from scalerl_api.reasons import Reason
from scalerl_api.recipe.presets import PRESETS, Published

DOCS = Path(__file__).parent
ALERTS = DOCS.parent / "charts" / "scalerl" / "files" / "alerts.yaml"


def table(*columns: str, rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def presets() -> str:
    """The presets side by side: what each gives, with the grade of its source."""
    paths = dict.fromkeys(path for fields in PRESETS.values() for path in fields)
    shown = [
        path for path in paths if any(path in fields for name, fields in PRESETS.items() if name != "scalerl")
    ]

    def cell(fields: Mapping[str, Published], path: str) -> str:
        return f"{fields[path].value} [{fields[path].source.grade}]" if path in fields else ""

    rows = [(f"`{path}`", *(cell(fields, path) for fields in PRESETS.values())) for path in shown]
    return table("field of `spec.recipe`", *(f"`{name}`" for name in PRESETS), rows=rows)


def _shown(path: str) -> str:
    """A field of a list's entries as the reference writes it."""
    return path.replace("task.mix.", "task.mix[].").replace("evaluation.sets.", "evaluation.sets[].")


def tables() -> dict[str, str]:
    """All tables of docs/operations.md by the name of their place in it."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return {
        "phases": table("phase", "meaning", rows=[(f"`{p}`", p.text) for p in Phase]),
        "conditions": table(
            "condition", "meaning of `True`", "what to do if there is a problem",
            rows=[(f"`{c}`", c.text, c.todo) for c in ConditionType],
        ),
        "edits": table(
            "field of `spec`", "effect of an edit",
            rows=[
                (", ".join(f"`{_shown(path)}`" for path, other in EDITS.items() if other == edit), f"{edit.effect.text} {edit.note}".strip())
                for edit in dict.fromkeys(EDITS.values())
            ],
        ),
        "reasons": table("reason", "what to do", rows=[(f"`{r}`", r.text) for r in Reason]),
        "alerts": table(
            "alert", "severity", "fires after",
            rows=[(f"[{r['alert']}](#{r['alert'].lower()})", r["labels"]["severity"], r["for"]) for r in rules],
        ),
    }  # fmt: skip


def vllm_architectures() -> tuple[Path, str]:
    """The module of the trainer with the architectures of the installed vLLM's registry."""
    from scalerl_trainer.models import served

    registry = served.registry_path()
    assert registry is not None, "vLLM is not installed"
    return Path(served.__file__).with_name("vllm_architectures.py"), served.source(
        served.read_registry(registry)
    )


def model_tables() -> dict[str, str]:
    """The tables of docs/models.md, from the families that the trainer's tests train."""
    support = str(DOCS.parent / "tests" / "support")
    if support not in sys.path:
        sys.path.append(support)
    import model_families

    return {rows: model_families.table(rows) for rows in ("trained", "refused")}


def renewed(page: str, of: dict[str, str]) -> str:
    """The text of a page with its tables as they should be."""
    for name, text in of.items():
        place = re.compile(rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- end -->)", re.S)
        if not place.search(page):
            raise SystemExit(f"no place for the table of {name}")
        page = place.sub(lambda match, text=text: f"{match[1]}\n{text}\n{match[2]}", page)
    return page


def main() -> int:
    """Write the pages, or with ``--check`` say whether it is as it should be."""
    parser = argparse.ArgumentParser(prog="python docs/tables.py", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is not up to date"
    )
    check: bool = parser.parse_args().check
    pages = {
        DOCS / "operations.md": tables(),
        DOCS / "recipe.md": {"presets": presets()},
        DOCS / "models.md": model_tables(),
    }
    texts = {path: renewed(path.read_text(encoding="utf-8"), of) for path, of in pages.items()}
    texts |= {DOCS / "reference" / name: write() for name, write in reference_pages.PAGES.items()}
    path, text = vllm_architectures()
    texts[path] = text
    for path, text in texts.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path}: not what the code says; run `make docs`", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
