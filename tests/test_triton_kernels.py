"""The Triton kernels in the interpreter, on launch tables by hand. `make test-interpret`."""

import pytest
import torch

from checking import by_slot
from padam_ext.slots import Signature

pytestmark = pytest.mark.interpret
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SIZES = (2 * 1024 + 37, 300, 1024)
# step_size, beta1, 1 - beta1, beta2, 1 - beta2 in two parts, eps, both decays, 1 / r, the exponent
# in whole and in two parts; the form of the second moment; root, which the kernel has as a
# constant; seed and step.
ROW = (
    0.1,
    0.9,
    0.1,
    0.999,
    0.0009,
    0.0001,
    1e-8,
    0.0,
    0.0,
    1.25,
    -0.25,
    -0.25,
    0.0,
    0.0,
    3.0,
    0.0,
    1.0,
)
DECOUPLED_DECAY = 8


class Table:
    """Tensors of SIZES, each with a row of its own; two blocks to a chunk."""

    def __init__(self, dtypes, compute_dtype, rows=(ROW,) * 3, factor=1.0, skip=0.0):
        dtypes = by_slot(dtypes, None)
        self.signature = Signature(tuple(dtypes), compute_dtype)
        torch.manual_seed(0)
        # [slot][tensor]
        self.slots = [
            [torch.randn(size).to(dtype or torch.float32) for size in SIZES] for dtype in dtypes
        ]
        for tensor in (*self.slots[3], *self.slots[4]):
            tensor.abs_()
        absent = [dtype is None for dtype in dtypes]
        addresses = [
            0 if gone else tensor.data_ptr()
            for gone, tensors in zip(absent, self.slots, strict=True)
            for tensor in tensors
        ]
        block = 4096 // compute_dtype.itemsize
        chunks = [
            (i, first) for i, size in enumerate(SIZES) for first in range(0, -(-size // block), 2)
        ]
        self.addresses = torch.tensor(addresses)
        self.numels = torch.tensor(SIZES)
        self.salts = torch.zeros(len(SIZES), dtype=torch.int64)
        self.rows = torch.tensor([2, 0, 1])
        self.constants = torch.tensor(rows, dtype=torch.float64).flatten()
        self.control = torch.tensor([factor, skip], dtype=torch.float64)
        self.chunk_tensors, self.chunk_first_blocks = torch.tensor(chunks).T.contiguous()
        self.num_chunks, self.blocks_per_chunk = len(chunks), 2

    def step(self):
        # Imported here: outside of the interpreter the kernels would be for the compiler.
        from padam_ext.kernels import multi_tensor_padam

        multi_tensor_padam.launch(self, self.signature, root=3)
        return self.slots


def stored(tensor, dtype):
    """What the interpreter stores: it cuts bfloat16 off. test_compile.py sees that GPUs round."""
    if dtype == torch.bfloat16:
        tensor = (tensor.view(torch.int32) & -65536).view(torch.float32)
    return tensor.to(dtype)


@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize(
    ("dtypes", "compute"),
    [
        ((BF16, BF16, F32, F32, F32), F32),
        ((F16, F32, F32, F32, F32), F32),
        ((F32, F32, BF16, F32, F32), F32),
        ((F32, F16, F32, BF16, F16), F32),
        ((BF16, BF16, BF16, BF16, BF16), F32),
        ((F32, F32, F32, F32, F32), F64),
    ],
    ids=str,
)
def test_a_slot_is_stored_as_its_dtype_and_computed_with_as_another(dtypes, compute, amsgrad):
    """As in tensors of the dtype of the arithmetic, but rounded where it is stored."""
    if not amsgrad:
        dtypes = (*dtypes[:4], None)
    table = Table(dtypes, compute)
    wide = Table([dtype and compute for dtype in dtypes], compute)
    for narrow_slot, wide_slot in zip(table.slots, wide.slots, strict=True):
        for narrow_tensor, wide_tensor in zip(narrow_slot, wide_slot, strict=True):
            wide_tensor.copy_(narrow_tensor)
    before = [tensor.clone() for tensor in table.slots[4]]
    results = table.step(), wide.step()
    for narrow_slot, wide_slot in zip(*results, strict=True):
        for narrow_tensor, wide_tensor in zip(narrow_slot, wide_slot, strict=True):
            assert torch.equal(narrow_tensor, stored(wide_tensor, narrow_tensor.dtype))
    if not amsgrad:
        assert all(map(torch.equal, table.slots[4], before))


@pytest.mark.parametrize("compute", [F32, F64], ids=str)
def test_constants_and_control_are_doubles_whatever_the_arithmetic(compute):
    """Rounded to its dtype, once, in the kernel."""
    rows = [tuple(x + i * 0.01 for x in ROW[:9]) + ROW[9:] for i in range(3)]
    factor = 1 / 3
    exact = Table((compute,) * 5, compute, rows, factor)
    rounded = Table((compute,) * 5, compute, rows, factor)
    rounded.constants = rounded.constants.to(compute).double()
    rounded.control = rounded.control.to(compute).double()
    for one, other in zip(exact.step(), rounded.step(), strict=True):
        assert all(map(torch.equal, one, other))


def test_a_step_to_skip_changes_nothing():
    table = Table((F32,) * 5, F32, factor=float("nan"), skip=1.0)
    before = [[tensor.clone() for tensor in slot] for slot in table.slots]
    for one, other in zip(table.step(), before, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("compute", [F32, F64], ids=str)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_decoupled_decay_leaves_infinite_parameters_as_they_are(value, compute):
    row = (*ROW[:DECOUPLED_DECAY], 0.01, *ROW[DECOUPLED_DECAY + 1 :])
    decayed, plain = (Table((compute,) * 5, compute, (rows,) * 3) for rows in (row, ROW))
    for table in (decayed, plain):
        for x in table.slots[0]:
            x[[5, -1]] = value
    for one, other in zip(decayed.step()[0], plain.step()[0], strict=True):
        torch.testing.assert_close(one[[5, -1]], other[[5, -1]], equal_nan=True, rtol=0, atol=0)
        assert one[5].isnan() if value != value else one[5] == value
        assert not (one[6:-1] == other[6:-1]).any()


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_sums_of_squares_are_doubles(dtype):
    from padam_ext.kernels import multi_tensor_norm

    compute = F64 if dtype == F64 else F32
    table = Table((dtype, dtype, compute, compute, compute), compute)
    guarded = torch.full((table.num_chunks + 2,), -1.0, dtype=F64)
    table.partial_sums = guarded[1:-1]
    multi_tensor_norm.launch(table, table.signature)
    total = sum((g.double() ** 2).sum() for g in table.slots[1])
    torch.testing.assert_close(table.partial_sums.sum(), total, rtol=1e-6, atol=0)
    # Each was formed in the dtype of the arithmetic.
    assert torch.equal(table.partial_sums, table.partial_sums.to(compute).double())
    assert guarded[[0, -1]].tolist() == [-1.0, -1.0]
