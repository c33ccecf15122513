"""The documents: their Python code runs, and what they name is there."""

import doctest
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import figures
import module_map
import oracle
import padam_ext
from cases import DEFAULTS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


# test_stacks.py runs the code of stacks.md, beside the libraries that it needs.
PAGES_WITH_CODE = [page for page in PAGES if code_of(page) and page.name != "stacks.md"]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_the_code_runs(page, tmp_path, monkeypatch):
    """From top to bottom in one namespace."""
    monkeypatch.chdir(tmp_path)  # where it may write
    namespace = {}
    exec(compile("\n".join(code_of(page)), page.name, "exec"), namespace)
    if "loss" in namespace:  # what was trained on the way has not been wrecked
        assert namespace["loss"]().item() < 1


def test_the_code_of_the_main_pages_is_found():
    assert {"README.md", "training.md"} <= {page.name for page in PAGES_WITH_CODE}


def anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_exists(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if fragment else []
        assert not fragment or fragment in map(anchor, headings), link


def commands_of(page):
    """What stands in backquotes, in fences and in indented blocks."""
    text = page.read_text()
    return re.findall(r"`[^`\n]+`|^```.*?^```|^ {4}[^\n]*$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there(page):
    code = "\n".join(commands_of(page))
    targets = re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?<!\S)`?make ([a-z][a-z0-9-]*)", code)) <= set(targets)
    for module in re.findall(r"python3? -m ([a-z_.]+)", code):
        assert find_spec(module), module


@pytest.mark.parametrize("page", ["extending.md", "internals.md"])
def test_files_and_names_of_the_code_are_there(page):
    """What is in backquotes."""
    text = (ROOT / "docs" / page).read_text()
    folders = ("padam_ext", "kernels", "csrc", "tests", "benchmarks")
    for path in re.findall(rf"`((?:{'|'.join(folders)})/[\w./]*)`", text):
        assert (ROOT / path.replace("NAME", "eager")).exists(), path
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.[chp]*")]
    known = {word for path in files for word in re.findall(r"\w+", path.read_text("latin-1"))}
    assert set(re.findall(r"`(\w+)`", text)) <= known


@pytest.mark.parametrize("name", ["FusedPadam", "IterateSampler", "step_during_backward"])
def test_the_example_of_a_docstring_runs(name):
    names = {"torch": torch, **vars(padam_ext)}
    finder = doctest.DocTestFinder(recurse=False)
    [example] = finder.find(getattr(padam_ext, name), name, globs=names)
    assert doctest.DocTestRunner().run(example) == (0, len(example.examples))


@pytest.mark.parametrize("partial", figures.PARTIALS)
def test_the_figure_of_p_is_the_formula(partial):
    h = np.logspace(-20, 2, 12)
    options = DEFAULTS | {"lr": 1.0, "partial": partial, "eps": figures.EPS}
    want = -oracle.movement(np.full(12, 3.0), h, 1, options)
    np.testing.assert_allclose(figures.step_size(3.0, h, partial), want.astype(float), rtol=1e-12)


def test_each_module_has_a_place_in_the_picture_of_imports():
    """And nothing imports upwards: room_graph would raise an error."""
    graph = module_map.room_graph()
    assert graph.has_edge("step()", "plan")
    assert graph.has_edge("launch table", "buckets")


def test_each_source_file_is_in_the_tree():
    """That of CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, section = page.partition("## Where things are\n")
    tree, _, _ = section.partition("\n## ")
    named = set(re.findall(r"[\w.]+\.\w+", tree))
    files = {
        file.name
        for folder in ("padam_ext", "csrc", "kernels", "benchmarks", "examples", "docs")
        for kind in ("*.py", "*.h", "*.cpp", "*.cu")
        for file in (ROOT / folder).rglob(kind)
    }
    assert len(files) > 80
    assert files <= named
