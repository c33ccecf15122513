"""Kernels write the running maximum only where it rises: memory is what limits a large step."""

import mmap
import re
import tempfile

import pytest
import torch

from padam_ext import FusedPadam

PAGE = mmap.PAGESIZE
PAGES = 8
MAXIMUM = 4.0  # no second moment below is near it, unless its gradient is LARGE
LARGE = 1000.0


@pytest.fixture
def maxima():
    """Memory of PAGES pages full of MAXIMUM, of which the system copies each that is written."""
    with tempfile.TemporaryFile() as file:
        yield lambda dtype: _mapped(file, dtype)


def _mapped(file, dtype):
    values = torch.full((PAGES * PAGE // dtype.itemsize,), MAXIMUM, dtype=dtype)
    file.write(values.numpy().tobytes())
    file.flush()
    return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=dtype)


def pages_written(tensor):
    """How many pages of mapped memory differ from the file's."""
    address = tensor.data_ptr()
    with open("/proc/self/smaps") as smaps:
        for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read()):
            begin, end = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                return int(re.search(r"Anonymous:\s+(\d+) kB", mapping)[1]) * 1024 // PAGE
    raise AssertionError("no mapping of this memory")


@pytest.mark.numbers
@pytest.mark.parametrize("partial", [1 / 8, 1 / 4, 1 / 2, 0.3])
@pytest.mark.parametrize(
    ("param_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2],
)
def test_only_lines_with_a_rise_are_written(param_dtype, dtype, partial, maxima, backend):
    h = maxima(dtype)
    param = torch.nn.Parameter(torch.ones(h.numel(), dtype=param_dtype))
    optimizer = FusedPadam([param], lr=0.01, partial=partial, weight_decay=0.1, backend=backend)
    optimizer.init_state()
    optimizer.state[param]["max_exp_avg_sq"] = h
    param.grad = torch.full_like(param, 0.5)
    for _ in range(2):
        optimizer.step()
    assert pages_written(h) == (PAGES if backend == "eager" else 0)  # torch.maximum writes all
    assert (h == MAXIMUM).all()

    per_page = PAGE // dtype.itemsize
    risen = [per_page + 3, 3 * per_page, 4 * per_page - 1, h.numel() - 1]  # in three pages
    with torch.no_grad():
        param.grad[risen] = LARGE
        param.grad[3 * per_page] = torch.nan
    optimizer.step()
    v = optimizer.state[param]["exp_avg_sq"]
    assert torch.equal(h.nan_to_num(-1), torch.maximum(v, torch.tensor(MAXIMUM)).nan_to_num(-1))
    assert h[3 * per_page].isnan()
    assert (h[risen] != MAXIMUM).all()
    assert pages_written(h) == (PAGES if backend == "eager" else 3)
