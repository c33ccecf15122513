from pathlib import Path

import pytest
import torch

import padam_ext
from checking import INTERPRETED
from padam_ext import native

# Every way to compute a step. A backend that cannot run here is listed all the same: its tests
# fail, they are not skipped. Triton's interpreter and compiler do not mix in one process, so
# `make test-interpret` makes one of its own, for the triton backend only.
LEVELS = native.module.available_simd_levels() if native.module else ["missing"]
VARIANTS = [*(f"cpu-{level}" for level in LEVELS), "eager"] + [
    pytest.param(name, marks=pytest.mark.gpu) for name in ("triton@cuda", "eager@cuda")
]
if INTERPRETED:
    VARIANTS = ["triton"]


@pytest.fixture(params=VARIANTS)
def backend(request, monkeypatch):
    """The name of each backend in turn; the CPU's once for each SIMD level.

    Beside @ stands the device on which the test then makes its tensors.
    """
    name, _, device = request.param.partition("@")
    name, _, level = name.partition("-")
    if level:
        monkeypatch.setattr(native, "simd_level", lambda: level)
    with torch.device(device or "cpu"):
        yield name


def pytest_addoption(parser):
    parser.addoption("--expect-package-in", help="fail unless this folder's padam_ext is tested")


def pytest_configure(config):
    # What torch warns of once per process would be found by whichever test came first.
    torch.set_warn_always(True)
    folder = config.getoption("--expect-package-in")
    if folder and Path(folder).resolve() not in Path(padam_ext.__file__).resolve().parents:
        raise pytest.UsageError(f"testing {padam_ext.__file__}, which is not in {folder}")
