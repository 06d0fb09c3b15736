"""`python charts/dashboards [--out DIR]`: write the chart's Grafana dashboards. The same code writes the same bytes.

What lives here: which questions the dashboards answer (`fleet`, `one_run`, `operators`: titles, queries, units) and how
a panel looks (`panels`, the one importer of the Grafana SDK). What never does: metrics that no process of the system has;
a test takes every query apart and looks its names up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import fleet
import one_run
import operators

COMMITTED = Path(__file__).parents[1] / "scalerl" / "dashboards"


def main() -> int:
    """Write one file a dashboard."""
    parser = argparse.ArgumentParser(prog="python charts/dashboards", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=COMMITTED, help="folder to write to (default: the chart's)"
    )
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, board in (("fleet", fleet.BOARD), ("run", one_run.BOARD), ("operator", operators.BOARD)):
        (out / f"{name}.json").write_text(board.json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
