"""The documents: their Python code runs, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

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
