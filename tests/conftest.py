import pytest

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
