"""The picture of internals.md: which room of padam_ext imports which, and the way of a step.

Drawn from the imports as they are. A module in no room is an error, and so are rooms that import
each other in a circle.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PACKAGE = Path(__file__).parents[1] / "padam_ext"
KERNELS = PACKAGE.parent / "kernels"  # installed as padam_ext.kernels


class Room(NamedTuple):
    """Modules that belong together.

    Attributes:
        modules: by name, without `padam_ext.`; that of a sub-package has its modules, too.
        column: where the picture has it; how far down follows from the imports.
        stage: its place in the way of a step; 0 for what serves several.
    """

    modules: str
    column: int = 0
    stage: int = 0


ROOMS = {
    "what users import": Room(
        "__init__ __main__ backward bench custom_op iterate_sampler distributed.ddp "
        "distributed.functional distributed.adam_load_planner"
    ),
    "step()": Room("optimizer checkpoint param_index", stage=1),
    "driver": Room("driver choice trial"),
    "plan": Room("plan precision", stage=3),
    "several processes": Room(
        "distributed.reduction distributed.plain_shards distributed.grad_scaler", column=2
    ),
    "backend": Room("backends", stage=6),
    "kernels: Triton": Room("kernels", column=-1, stage=7),
    "kernels: PyTorch": Room("reference", column=-2, stage=7),
    "launch table": Room("launch_table rows step_counts", stage=5),
    "clip, unscale, skip": Room("control norm step_control", column=1),
    "buckets": Room("buckets", stage=4),
    "gather": Room("gather", stage=2),
    "kernels: C++, CUDA": Room("native", column=-1, stage=7),
    "a parameter's state": Room("state conversion checks"),
    "options": Room("options optimizer_options constants"),
    "stored elements": Room("slots codecs packed_states random_bits"),
    "torch's tensors": Room("layout runtime caller", column=1),
}
STAGES = ("step()", "gather", "plan", "buckets", "launch table", "backend", "kernels")

COLUMN, ROW = 1.8, 0.98  # inches between the middles of rooms
WIDTH, LINE = 1.64, 0.15  # of a room; of a line of its text
BLUE, PALE, GRAY = "#1d4ed8", "#dbeafe", "#6b7280"


def _modules() -> dict[str, Path]:
    """Each module of the package by its name without `padam_ext.`."""
    found = {}
    for folder, prefix in ((PACKAGE, ()), (KERNELS, ("kernels",))):
        for path in folder.rglob("*.py"):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if parts[-1] == "__init__" and len(parts) > 1:
                parts = parts[:-1]
            found[".".join(parts)] = path
    return found


def _imports(path: Path, names: set[str]) -> set[str]:
    """What a module imports of the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("padam_ext"):
            package = node.module.removeprefix("padam_ext").removeprefix(".")
            for alias in node.names:
                whole = f"{package}.{alias.name}".removeprefix(".")
                found.add(whole if whole in names else package or "__init__")
    return found


def _room_of(module: str) -> str:
    for name, room in ROOMS.items():
        if any(f"{module}.".startswith(f"{own}.") for own in room.modules.split()):
            return name
    raise ValueError(f"padam_ext.{module} is in none of docs/module_map.py's ROOMS: add it to one")


def room_graph() -> nx.DiGraph:
    """An edge from each room to those that it imports.

    Raises:
        ValueError: a module is in no room, or rooms import each other in a circle.
    """
    modules = _modules()
    listed = {name for room in ROOMS.values() for name in room.modules.split()}
    if gone := listed - set(modules):
        raise ValueError(f"ROOMS has modules that padam_ext has not: {sorted(gone)}")
    graph = nx.DiGraph()
    graph.add_nodes_from(ROOMS)
    because = defaultdict(list)
    for module, path in modules.items():
        for other in _imports(path, set(modules)):
            edge = _room_of(module), _room_of(other)
            if edge[0] != edge[1]:
                because[edge].append(f"{module} imports {other}")
    graph.add_edges_from(because)
    if not nx.is_directed_acyclic_graph(graph):
        circle = nx.find_cycle(graph)
        raise ValueError(f"rooms in a circle: {[because[edge] for edge in circle]}")
    return graph


def draw(path: Path) -> None:
    """Writes the picture as SVG."""
    graph = nx.transitive_reduction(room_graph())
    layers = list(nx.topological_generations(graph))
    rooms = {}
    for row, names in enumerate(layers):
        for name in names:
            rooms[name] = _Box(name, ROOMS[name].column * COLUMN, -(row + 1) * ROW)
    if len({(box.x, box.y) for box in rooms.values()}) < len(rooms):
        raise ValueError("two rooms of one row are in the same column: change it in ROOMS")
    path.parent.mkdir(exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "padam_ext"}):
        figure = plt.figure(figsize=(5 * COLUMN, (len(layers) + 1) * ROW))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-2.5 * COLUMN, 2.5 * COLUMN), ylim=(-(len(layers) + 0.5) * ROW, ROW / 2))
        axes.set_axis_off()
        _draw_way(axes)
        for start, end in sorted(graph.edges):
            _draw_import(axes, rooms[start], rooms[end])
        for box in rooms.values():
            box.draw(axes)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


class _Box:
    """A room in the picture: its name over its modules."""

    def __init__(self, name: str, x: float, y: float) -> None:
        words = ROOMS[name].modules.replace("backends", "backends/").replace("kernels", "kernels/")
        columns = 2 if max(map(len, words.split())) > 24 else 1
        lines = textwrap.fill(words, 25 * columns, break_on_hyphens=False)
        self.name, self.x, self.y, self.lines = name, x, y, lines
        self.width = WIDTH + (columns - 1) * COLUMN
        self.height = (lines.count("\n") + 2) * LINE + 0.16

    def draw(self, axes: Axes) -> None:
        stage = ROOMS[self.name].stage
        _draw_frame(axes, self.x, self.y, self.width, self.height, stage)
        top = self.y + self.height / 2 - 0.08
        axes.text(self.x, top, self.name, ha="center", va="top", fontsize=9, weight="bold")
        axes.text(
            self.x, top - LINE - 0.03, self.lines, ha="center", va="top", fontsize=7.2,
            family="monospace", color="#374151", linespacing=1.25,
        )  # fmt: skip


def _draw_frame(axes: Axes, x: float, y: float, width: float, height: float, stage: int) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height,
            boxstyle="round,pad=0,rounding_size=0.06", zorder=2,
            facecolor=PALE if stage else "white", edgecolor=BLUE if stage else GRAY,
        )
    )  # fmt: skip
    if stage:
        axes.text(
            x - width / 2, y + height / 2, str(stage), ha="center", va="center", fontsize=8.5,
            color="white", weight="bold", zorder=4,
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": BLUE, "edgecolor": "white"},
        )  # fmt: skip


def _draw_way(axes: Axes) -> None:
    """The stages, from left to right."""
    gap = 5 * COLUMN / len(STAGES)
    for place, stage in enumerate(STAGES):
        x = (place - (len(STAGES) - 1) / 2) * gap
        _draw_frame(axes, x, 0.1, gap * 0.78, 0.34, place + 1)
        axes.text(x, 0.1, stage, ha="center", va="center", fontsize=9, weight="bold", zorder=3)
        if place > 0:
            ends = {"xy": (x - gap * 0.46, 0.1), "xytext": (x - gap * 0.6, 0.1)}
            axes.annotate("", arrowprops={"arrowstyle": "-|>", "color": BLUE}, **ends)


def _draw_import(axes: Axes, start: _Box, end: _Box) -> None:
    """An arrow with at most one corner."""
    side = (end.x > start.x) - (end.x < start.x)
    if abs(end.x) >= abs(start.x):  # away from the middle: sideways, then down
        corner = end.x, start.y
        tip = end.x, end.y + end.height / 2
    else:  # down, then sideways
        corner = start.x, end.y
        tip = end.x - side * end.width / 2, end.y
    axes.plot([start.x, corner[0]], [start.y, corner[1]], color=GRAY, linewidth=1.2, zorder=1)
    arrow = {"arrowstyle": "-|>", "color": GRAY, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.2}
    axes.annotate("", xy=tip, xytext=corner, arrowprops=arrow, zorder=1)
