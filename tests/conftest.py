from pathlib import Path

import pytest

import padam_ext
from padam_ext import native
from padam_ext.backends import BACKENDS

# Every way to compute a step. A backend that cannot run here is listed all the same: its tests
# fail, they are not skipped.
LEVELS = native.module.available_simd_levels() if native.module else ["missing"]
VARIANTS = [
    variant
    for backend in BACKENDS
    for variant in (
        [f"cpu-{level}" for level in LEVELS] if backend.name == "cpu" else [backend.name]
    )
]


@pytest.fixture(params=VARIANTS)
def backend(request, monkeypatch):
    """The name of each backend in turn; the CPU's once for each SIMD level."""
    name, _, level = request.param.partition("-")
    if level:
        monkeypatch.setattr(native, "simd_level", lambda: level)
    return name


def pytest_addoption(parser):
    parser.addoption("--expect-package-in", help="fail unless this folder's padam_ext is tested")


def pytest_configure(config):
    folder = config.getoption("--expect-package-in")
    if folder and Path(folder).resolve() not in Path(padam_ext.__file__).resolve().parents:
        raise pytest.UsageError(f"testing {padam_ext.__file__}, which is not in {folder}")
