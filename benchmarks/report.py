"""What `make bench` reports: tables in the terminal and as Markdown, all rows as CSV, a plot.

    python -m benchmarks.report RESULTS.json [--out FOLDER] [--command COMMAND]

RESULTS.json is what pytest-benchmark wrote; the files in FOLDER have its name. A step's time is the
median over all turns; on a GPU it is the time on the device, and the host's time stands beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

Benchmarks = list[dict[str, Any]]
EAGER = "Padam, eager loop"
OURS = ("FusedPadam, triton", "FusedPadam, cuda", "FusedPadam, cpu")


@dataclass(frozen=True)
class Row:
    """One implementation on one workload; times in seconds, sizes in bytes."""

    workload: str
    dtype: str
    implementation: str
    seconds: float
    host_seconds: float
    tensors: int
    elements: int
    divisor: int
    bytes: int
    gigabytes_per_second: float
    bandwidth_fraction: float
    copy_fraction: float
    launches: int | None
    peak_memory: int | None

    @property
    def group(self) -> str:
        """What it is compared within."""
        size = f", 1/{self.divisor}" if self.divisor > 1 else ""
        return f"{self.workload}{size}, {self.dtype}"


def collect(benchmarks: Benchmarks) -> list[Row]:
    """One row for each workload, dtype and implementation, its turns put together."""
    turns = defaultdict(list)
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        if "dtype" in info:
            turns[info["workload"], info["dtype"], info["implementation"]].append(benchmark)
    rows = []
    for key, of_turns in turns.items():
        infos = [benchmark["extra_info"] for benchmark in of_turns]
        host = median(time for benchmark in of_turns for time in benchmark["stats"]["data"])
        on_device = [info["device_seconds"] for info in infos if "device_seconds" in info]
        seconds = median(on_device) if on_device else host
        first = next((info for info in infos if "launches" in info), infos[0])
        names = ("tensors", "elements", "divisor", "bytes")
        rows.append(
            Row(
                *key,
                seconds=seconds,
                host_seconds=host,
                gigabytes_per_second=first["bytes"] / seconds / 1e9,
                bandwidth_fraction=first["bytes"] / seconds / first["bandwidth"],
                copy_fraction=first["bytes"] / seconds / first["copy_bandwidth"],
                launches=first.get("launches"),
                peak_memory=first.get("peak_memory"),
                **{name: first[name] for name in names},
            )
        )
    return sorted(rows, key=lambda row: (row.group, row.seconds))


def in_groups(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by group and implementation, in the order of the workloads' elements."""
    groups: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: (row.dtype != "float32", row.elements, row.workload)):
        groups[row.group][row.implementation] = row
    return groups


def ratios(rows: list[Row]) -> Table:
    """How many times FusedPadam's step the others take."""
    names = {row.implementation for row in rows}
    ours = next((name for name in OURS if name in names), OURS[-1])
    table = Table(title=f"Time of a step, as a multiple of that of {ours}, p=1/8")
    table.add_column("workload")
    table.add_column(ours, justify="right")
    table.add_column("of the bandwidth", justify="right")
    others = sorted(names - {ours})
    for name in others:
        table.add_column(name, justify="right")
    for title, group in in_groups(rows).items():
        if ours not in group:  # it failed
            table.add_row(title)
            continue
        one = group[ours]
        table.add_row(
            title,
            f"{1000 * one.seconds:.3g} ms",
            f"{one.bandwidth_fraction:.2f}",
            *(f"{group[n].seconds / one.seconds:.2f}" if n in group else "" for n in others),
        )
    return table


def host_overhead(benchmarks: Benchmarks) -> Table | None:
    """Host time where the kernel has almost nothing to do; None where it was not measured."""
    times = defaultdict(list)
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        if "change" in info:
            key = (info["workload"], info["change"], info["implementation"])
            times[key] += benchmark["stats"]["data"]
    if not times:
        return None
    table = Table(title="Host time of a step of many small tensors")
    for heading in ("tensors", "before each step", "implementation"):
        table.add_column(heading)
    table.add_column("ms", justify="right")
    table.add_column("times FusedPadam, cpu", justify="right")
    for (workload, change, implementation), data in times.items():
        reference = median(times.get((workload, change, "FusedPadam, cpu"), [math.nan]))
        table.add_row(
            workload,
            change.replace("_", " "),
            implementation,
            f"{1000 * median(data):.3f}",
            f"{median(data) / reference:.2f}",
        )
    return table


def memory(benchmarks: Benchmarks) -> Table | None:
    """What stepping parameters one by one takes of Python's memory; None if not measured."""
    table = Table(title="Python's memory behind two passes in which each parameter is stepped")
    for heading in ("parameters", "implementation"):
        table.add_column(heading)
    table.add_column("bytes each", justify="right")
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        if "memory_per_parameter" in info:
            each = f"{info['memory_per_parameter']:.0f}"
            table.add_row(info["workload"], info["implementation"], each)
    return table if table.row_count else None


def floor(benchmarks: Benchmarks) -> Table | None:
    """Steps beside a plain loop over the same arrays; None where it was not measured."""
    table = Table(title="Speed of one step of 16M elements, as a fraction of a plain loop's")
    table.add_column("p")
    for heading in ("plain loop, ms", "FusedPadam, ms", "fraction"):
        table.add_column(heading, justify="right")
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        if "step_seconds" in info:
            loop, step = median(benchmark["stats"]["data"]), median(info["step_seconds"])
            table.add_row(
                f"{info['partial']:g}", f"{1000 * loop:.2f}", f"{1000 * step:.2f}",
                f"{loop / step:.2f}",
            )  # fmt: skip
    return table if table.row_count else None


def training(benchmarks: Benchmarks) -> Table | None:
    """Large steps by how many running maxima rise; None where they were not measured."""
    measured = [b for b in benchmarks if "training" in b["extra_info"]]
    if not measured:
        return None
    times, risen = defaultdict(list), {}
    for benchmark in measured:
        info = benchmark["extra_info"]
        key = (info["training"], info["stored"], info["implementation"])
        times[key] += benchmark["stats"]["data"]
        risen[key] = info["lines_risen"]
    table = Table(title="One step of 16M elements, by how many running maxima rise")
    for heading in ("state", "parameters", "implementation"):
        table.add_column(heading)
    for heading in ("lines with a rise", "ms", "torch AMSGrad, fused / this"):
        table.add_column(heading, justify="right")
    for (state, stored, name), data in times.items():
        reference = median(times.get((state, stored, "torch AMSGrad, fused"), [math.nan]))
        table.add_row(
            state, stored, name, f"{100 * risen[state, stored, name]:.0f} %",
            f"{1000 * median(data):.1f}", f"{reference / median(data):.2f}",
        )  # fmt: skip
    return table


def plot(rows: list[Row], path: Path) -> None:
    """Speedup over the eager loop, and the share of the bandwidth, as two panels of bars."""
    groups = {title: g for title, g in in_groups(rows).items() if EAGER in g}
    names = sorted({name for g in groups.values() for name in g if name != EAGER})
    figure, panels = plt.subplots(1, 2, figsize=(13, 1 + 0.55 * len(groups)), sharey=True)
    height = 0.85 / max(len(names), 1)
    for k, name in enumerate(names):
        present = [(at, g[name], g[EAGER]) for at, g in enumerate(groups.values()) if name in g]
        places = [at + (k + 0.5) * height - 0.425 for at, _, _ in present]
        speedups = [eager.seconds / row.seconds for _, row, eager in present]
        panels[0].barh(places, speedups, height, label=name)
        panels[1].barh(places, [row.bandwidth_fraction for _, row, _ in present], height)
    panels[0].set_xscale("log")
    panels[0].set_xlabel("speed, eager loop = 1")
    panels[1].set_xlabel("bytes that must move, share of the bandwidth")
    panels[0].set_yticks(range(len(groups)), groups)
    panels[0].invert_yaxis()
    for panel in panels:
        panel.grid(axis="x", alpha=0.3)
        panel.axvline(1, color="black", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_csv(rows: list[Row], path: Path) -> None:
    """Every row with all that is known of it."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, asdict(rows[0]))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> None:
    """Prints the tables and writes RESULTS.md, RESULTS.csv and RESULTS.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what pytest-benchmark wrote as JSON")
    parser.add_argument("--out", type=Path, default=Path("out"), help="default %(default)s")
    parser.add_argument(
        "--command", default="pytest", help="what measured, to be named in the report"
    )
    options = parser.parse_args()
    if not options.results.exists():
        parser.error(f"there is no {options.results}; make bench writes out/step-cpu.json")
    results = json.loads(options.results.read_text())
    machine, benchmarks = results["machine_info"], results["benchmarks"]
    rows = collect(benchmarks)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    origin = (
        f"Measured on {results['datetime'][:10]} by `{options.command}`: {machine['device']}; "
        f"{versions}. Medians over turns."
    )
    tables = [ratios(rows)] if rows else []
    tables += [
        table for make in (training, floor, host_overhead, memory) if (table := make(benchmarks))
    ]

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / options.results.stem
    console = Console()
    with path.with_suffix(".md").open("w") as file:
        markdown = Console(file=file, width=400)
        markdown.print(f"{origin}\n", soft_wrap=True)
        for table in tables:
            console.print(table)
            markdown.print(f"**{table.title}**\n")
            table.title, table.box = None, MARKDOWN
            markdown.print(table)
    if rows:
        write_csv(rows, path.with_suffix(".csv"))
        plot(rows, path.with_suffix(".png"))
    console.print(f"{origin}\nThe tables, all rows and a plot are in {options.out}.")


if __name__ == "__main__":
    main()
