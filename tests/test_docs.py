"""The Python code of the documents runs, each page from top to bottom in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(tmp_path)  # where it may write
    namespace = {}
    exec(compile("\n".join(blocks), page.name, "exec"), namespace)
    if "loss" in namespace:  # what was trained on the way has not been wrecked
        assert namespace["loss"]().item() < 1
