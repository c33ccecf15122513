"""The CUDA kernels' code, run on the CPU, beside the CPU's own kernel: every compiled signature."""

import math
from array import array
from itertools import product

import pytest
import torch

from checking import by_slot
from padam_ext import codecs, native, packed_states
from padam_ext.constants import make_constants
from padam_ext.packed_states import Moments, upper_end
from test_native import ABSENT, OPTIONS, STORED_DTYPES, row, sum_of_squares, table

SIZE = 3 * 1024 + 77
F32, F64, BF16, F16, WORD, LOW, STOCHASTIC = range(7)
FLOATS = ((F32, F32), (F32, F32, F32))
PACKED = ((ABSENT, ABSENT, ABSENT, WORD), (ABSENT, ABSENT, ABSENT, ABSENT, WORD))
DOUBLES = ((F64, F64), (F64, F64, F64))
SIGNATURES = [
    [*by_slot([*dtypes, *moments], ABSENT)[:-1], low]
    for *dtypes, low, ways in (
        (F32, F32, ABSENT, FLOATS + PACKED), (F64, F64, ABSENT, DOUBLES),
        (BF16, BF16, ABSENT, FLOATS + PACKED), (BF16, F32, ABSENT, FLOATS + PACKED),
        (F16, F16, ABSENT, FLOATS + PACKED), (F16, F32, ABSENT, FLOATS + PACKED),
        (BF16, BF16, LOW, FLOATS + PACKED), (BF16, F32, LOW, FLOATS + PACKED),
        (STOCHASTIC, BF16, ABSENT, FLOATS + PACKED), (STOCHASTIC, F32, ABSENT, FLOATS + PACKED),
    )
    for moments in ways
]  # fmt: skip
SALT = 0x85EBCA6B
BF16_DTYPE = torch.bfloat16
pytestmark = pytest.mark.sanitize
each_signature = pytest.mark.parametrize("signature", SIGNATURES, ids=str)


def slots_of(signature):
    generator = torch.Generator().manual_seed(1)
    x, g, m, v, h = (torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(5))
    v, h = v.square(), h.square()
    m32, v32, h32 = m.float(), v.float(), torch.maximum(h, v).float()
    mvh = packed_states.pack_mvh(Moments(m32, v32, upper_end(h32)))
    mv = packed_states.pack_mv(Moments(m32, v32, None))
    low = torch.randint(-(2**15), 2**15, (SIZE,), generator=generator)
    return [
        None
        if code == ABSENT
        else slot.to(BF16_DTYPE if code == STOCHASTIC else STORED_DTYPES[code])
        for slot, code in zip((x, g, m, v, h, mvh, mv, low), signature, strict=True)
    ]


class OneTensor:
    """A device's table of one tensor, in the host's memory."""

    def __init__(self, slots, constants, signature, grad_factor=1.0, skip=0.0):
        self.compute = int(signature[0] == F64)
        block = native.module.block_of(self.compute)
        chunks = range(0, -(-SIZE // block), 2)
        self.kept = {
            "addresses": torch.tensor(
                by_slot([0 if s is None else s.data_ptr() for s in slots], 0)
            ),
            "numels": torch.tensor([SIZE]),
            "salts": torch.tensor([SALT]),
            "rows": torch.tensor([0]),
            "constants": torch.tensor(constants.tolist(), dtype=torch.float64),
            "control": torch.tensor([grad_factor, skip], dtype=torch.float64),
            "chunk_tensors": torch.zeros(len(chunks), dtype=torch.int64),
            "chunk_first_blocks": torch.tensor(list(chunks)),
            "partial_sums": torch.zeros(len(chunks), dtype=torch.float64),
        }
        self._native = native.module.DeviceTable(
            **{name: tensor.data_ptr() for name, tensor in self.kept.items()},
            limits=0, prepared_control=0, row_sources=0, counters=0, num_tensors=1,
            num_chunks=len(chunks), blocks_per_chunk=2, num_late_rows=0, counts_on_device=False,
            slot_dtypes=signature, compute_dtype=self.compute,
        )  # fmt: skip

    def step(self):
        native.module.step_on_host(self._native)

    def sum_of_squares(self):
        native.module.sum_of_squares_on_host(self._native)
        return self.kept["partial_sums"]


@each_signature
def test_a_step_is_the_same_as_on_the_cpu(signature):
    for partial, decay, decoupled in product(
        (0.0, 0.5, 0.25, 0.125, 0.0625, 0.3), (0.0, 0.1), (False, True)
    ):
        options = OPTIONS._replace(
            seed=3, partial=partial, weight_decay=decay, decoupled_weight_decay=decoupled
        )
        ours, other = slots_of(signature), slots_of(signature)
        start = ours[0].clone()
        one = OneTensor(ours, row(options), signature, grad_factor=0.37)
        one.step()
        native.module.step_cpu(
            **table([other])
            | {
                "constants": row(options),
                "slot_dtypes": signature,
                "compute_dtype": one.compute,
                "grad_factor": 0.37,
                "salts": array("q", [SALT]),
            }
        )
        assert not torch.equal(ours[0], start)
        for code, mine, its in zip(signature, ours, other, strict=True):
            # Where rounding differs by a unit, another number may have been drawn to, or the lower
            # half of a parameter is another altogether; hardly ever.
            if code in (WORD, STOCHASTIC):
                assert (mine != its).float().mean() < 0.003
            elif code == LOW:
                joined = [codecs.join(slots[0], slots[-1]) for slots in (ours, other)]
                torch.testing.assert_close(*joined, rtol=5e-7, atol=4e-7)
            elif code != ABSENT and signature[-1] == ABSENT:
                units = 4 if mine.dtype.itemsize > 2 else 1
                torch.testing.assert_close(
                    mine, its, rtol=units * torch.finfo(mine.dtype).eps, atol=4e-7
                )


@each_signature
def test_a_step_that_control_skips_changes_nothing(signature):
    slots, before = slots_of(signature), slots_of(signature)
    OneTensor(slots, row(OPTIONS), signature, skip=1.0).step()
    for after, slot in zip(slots, before, strict=True):
        assert after is None or torch.equal(after, slot)


@each_signature
def test_partial_sums_are_doubles(signature):
    slots = slots_of(signature)
    one = OneTensor(slots, row(OPTIONS), signature)
    sums = one.sum_of_squares()
    on_cpu = sum_of_squares(table([slots]))
    assert math.fsum(sums.tolist()) == pytest.approx(on_cpu, rel=1e-6)
    if not one.compute:  # summed in float32, then stored
        assert torch.equal(sums, sums.float().double())


def test_constants_are_doubles_that_the_kernel_rounds():
    """0.1 as a double moves a float64 parameter; its float32 neighbour would show."""
    signature = by_slot([F64] * 5, ABSENT)
    slots = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(5)]
    slots[1].fill_(1.0)
    constants = array("d", row(OPTIONS._replace(beta1=0.0, partial=0.0)))
    assert constants[0] == make_constants(OPTIONS, 1.0).step_size == 0.1
    OneTensor(slots, constants, signature).step()
    assert (slots[0] == -0.1).all()
