"""`make lint` prints how large the operator is, beside what it is to be. It never fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "operator" / "src" / "scalerl_operator"


def main() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    names = Counter(path.stem for path in files if path.stem != "__init__")
    controller = [path for path in (SOURCE / "controller").glob("*.py") if path.stem != "__init__"]
    twice = sorted(name for name, count in names.items() if count > 1)
    print(
        f"operator: {sum(lines.values())} lines (target 8500), reconcile.py {lines[SOURCE / 'controller' / 'reconcile.py']} "
        f"(200), controller/ {len(controller)} modules (12), module names used twice: {', '.join(twice) or 'none'}"
    )


if __name__ == "__main__":
    main()
