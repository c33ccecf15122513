"""How a slot is read and written: its storage dtype in memory, the arithmetic's in a kernel."""

import triton
import triton.language as tl


@triton.jit
def load(pointer, compute_dtype: tl.constexpr, mask, other):
    """Reads a block, widened to `compute_dtype`; `other` where the mask is false."""
    return tl.load(pointer, mask=mask, other=other).to(compute_dtype)


@triton.jit
def store(pointer, value, mask):
    """Writes a block, rounded to nearest even where the storage dtype is narrower."""
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
