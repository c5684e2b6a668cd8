"""What every benchmark does alike: interleaved timing, tables, and results that say where they were made."""

import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"


def interleaved(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict]:
    """Runs every job once a round, so that a slow minute of the machine is everybody's.

    Returns the median and the least wall time, and the median CPU time of all cores, in seconds, of each job.
    """
    for job in jobs.values():  # to warm up
        jax.block_until_ready(job())
    wall, cpu = ({name: [] for name in jobs} for _ in range(2))
    for _ in track(range(repeats), "timing", disable=not sys.stderr.isatty(), console=Console(stderr=True)):
        for name, job in jobs.items():
            start, busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(job())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - busy)
    return {
        name: {
            "seconds": statistics.median(wall[name]),
            "least_seconds": min(wall[name]),
            "cpu_seconds": statistics.median(cpu[name]),
        }
        for name in jobs
    }


def show(title: str, rows: list[dict]):
    """Prints dicts of one shape as a table."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else "-" if x is None else str(x) for x in row.values()))
    Console(width=130).print(table)


def hardware() -> str:
    """A short name for file names: cpu-2core, or the accelerator's."""
    device = jax.devices()[0]
    return f"cpu-{os.cpu_count()}core" if device.platform == "cpu" else device.device_kind.replace(" ", "-").lower()


def write(name: str, result: dict, out: str | None):
    """Writes the result as JSON, by default under results/, and prints it as the last line."""
    today = datetime.date.today().isoformat()
    where = pathlib.Path(out) if out else RESULTS / f"{name}_{hardware()}_{today}.json"
    made = {"date": today, "hardware": hardware(), "python": platform.python_version(), "jax": jax.__version__}
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(made | result, indent=1) + "\n")
    print(f"written to {where}")
    print(json.dumps(made | result))
