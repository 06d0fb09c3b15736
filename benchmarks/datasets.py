"""A data set of many rows: the time and memory of making its table, of opening it, and of reading prompts in random order.

The file is Parquet in the layout of verl, with about 400 bytes a row. A table of ten times as many rows is written without a file, and
opened too, unless the file has over a million. Each part runs in a process of its own, whose peak of resident memory is measured.

    python benchmarks/datasets.py [--rows 1000000] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scalerl_api.dataset_source import DatasetSource
from scalerl_tasks import DatasetSource as Source
from scalerl_tasks import open_dataset
from scalerl_tasks.dataset.rows import TableRow
from scalerl_tasks.dataset.table import Table, TableInfo, TableWriter

READS = 100_000
_BATCH = 50_000


def write(path: Path, rows: int) -> None:
    """A Parquet file as verl's preprocessing of GSM8K writes it."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    def row(i: int) -> dict[str, object]:
        question = f"Problem {i}: " + 30 * "word "
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i, "answer": f"#### {i}"},
        }

    schema = pyarrow.Table.from_pylist([row(0)]).schema
    with ParquetWriter(path, schema) as writer:
        for start in range(0, rows, _BATCH):
            batch = [row(i) for i in range(start, min(start + _BATCH, rows))]
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))


def write_table(path: Path, rows: int) -> None:
    """A table with rows like those of :func:`write`."""
    with TableWriter(path) as table:
        for i in range(rows):
            row = TableRow(
                0, i + 1, f"{i:016x}", f"Problem {i}: " + 30 * "word ", str(i), metadata={"ability": "math"}
            )
            table.add(table.encode(row))
        table.finish(TableInfo("", rows, ["data.parquet"], ["row"], rows))


def part(path: Path) -> dict[str, float]:
    """Open the table, or a data set, which makes its table if there is none, and read prompts of it."""
    before = _peak_mib()
    begin, busy = time.perf_counter(), time.process_time()
    if path.suffix == ".rows":
        source = Source(Table(path))
    else:
        source = open_dataset(DatasetSource(files=["data.parquet"]), path)
    opened, busy = time.perf_counter() - begin, time.process_time() - busy
    opened_mib = _peak_mib()
    rng = random.Random(0)
    begin = time.perf_counter()
    for _ in range(READS):
        source[rng.randrange(len(source))]
    seconds = time.perf_counter() - begin
    return {
        "rows": len(source),
        "open_seconds": opened,
        "open_cpu_seconds": busy,
        "reads_per_second": READS / seconds,
        "start_mib": before,
        "open_mib": opened_mib,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    """Peak of resident memory, file mappings included. Not ``ru_maxrss``, which begins with that of the parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        begin = time.perf_counter()
        write(directory / "data.parquet", rows)
        size = (directory / "data.parquet").stat().st_size / 2**20
        print(f"{rows:,} rows, {size:,.0f} MiB of Parquet, written in {time.perf_counter() - begin:.0f} s")
        figures: dict[str, float] = {}
        large = directory / "large.rows"
        begin = time.perf_counter()
        parts = {"made": folder, "opened": folder}
        if rows <= 1_000_000:
            write_table(large, 10 * rows)
            print(f"a table of {10 * rows:,} rows, written in {time.perf_counter() - begin:.0f} s")
            parts["large"] = str(large)
        for name, path in parts.items():
            command = [sys.executable, __file__, "--part", path]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout)
            figures |= {f"{name}_{key}": round(value, 4) for key, value in found.items()}
            print(
                f"{name}: {found['open_seconds']:.3f} s ({found['open_cpu_seconds']:.3f} s of a core), memory {found['start_mib']:.0f} → {found['open_mib']:.0f} MiB at its "
                f"peak, after reads {found['peak_mib']:.0f} MiB; {found['reads_per_second']:,.0f} random reads/s"
            )
        (table,) = (directory / "data").glob("*.rows")
        figures["table_mib"] = round(table.stat().st_size / 2**20)
        print(f"the table has {figures['table_mib']:,.0f} MiB")
        print(json.dumps({"benchmark": "datasets", "figures": figures}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="20,000 rows")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(part(arguments.part)))
    else:
        main(20_000 if arguments.quick else arguments.rows)
