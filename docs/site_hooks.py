"""mkdocs hooks: the benchmarks' README is a page of the site, and links to other files of the repository become their paths."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"benchmarks/README.md": "benchmarks.md"}
"""Files outside ``docs/`` that are pages, by their address in the site."""
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for source, address in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, address, content=_relinked(text, source, address)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    address = page.file.src_uri
    return markdown if address in PAGES.values() else _relinked(markdown, f"docs/{address}", address)


def _relinked(text: str, source: str, address: str) -> str:
    """Links as they work in the site.

    Raises:
        ValueError: a link to a file that is not in the repository.
    """

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            raise ValueError(f"{source}: {target} does not exist")
        inside = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return label if label.startswith("`") else f"{label} (`{path}`)"
        return f"[{label}]({posixpath.relpath(inside, posixpath.dirname(address) or '.')}{anchor})"

    return _LINK.sub(replace, text)
