"""Kernels that read a table in a device's memory: launches, seams, 64-bit offsets, bounds.

The CUDA kernel's code runs on the CPU, Triton's in its interpreter (`make test-interpret`).
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import ON_CPU, SLOWLY
from checking import by_slot, step_and_check
from padam_ext import FusedPadam, backends, trial
from padam_ext.backends import cuda
from padam_ext.constants import ROOTS, RowOptions, make_constants
from padam_ext.slots import SLOTS, Signature

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.ptx_variants,
    pytest.mark.parametrize("backend", ON_CPU, indirect=True),
]
# x = -g: an element that is stepped twice, or not at all, shows.
OPTIONS = RowOptions(1.0, 0.0, 0.999, 1e-8, 0.0, 0.0, "none", False, False)


@pytest.fixture
def launches(backend, monkeypatch):
    """Programs of each launch of the kernel."""
    grids = []
    if backend == "cuda":
        original = cuda._launch_step

        def counting(table, root):
            grids.append((table.num_chunks,))
            original(table, root)

        monkeypatch.setattr(cuda, "_launch_step", counting)
        return grids

    from padam_ext.kernels import multi_tensor_padam as kernel

    [triton] = (one for one in backends.BACKENDS if one.name == "triton")
    trial.broken_reason(triton, torch.device("cpu"))  # makes a step of its own, once
    original = kernel.multi_tensor_padam

    class Counting:
        def __getitem__(self, grid):
            grids.append(grid)
            return original[grid]

    monkeypatch.setattr(kernel, "multi_tensor_padam", Counting())
    return grids


def test_groups_of_different_options_share_one_launch(launches, backend):
    options = [
        {"lr": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.1},
        {"partial": 0.4, "eps": 1e-2, "betas": (0.0, 0.99)},
        {"partial": 0.5, "maximize": True, "bias_correction": "adam"},
    ]
    count = 10 if SLOWLY else 100
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(3)) for _ in range(count)], **option}
        for option in options
    ]
    optimizer = FusedPadam(groups, backend=backend)
    for _ in range(2):
        for group in groups:
            for param in group["params"]:
                param.grad = torch.randn(3)
        step_and_check(optimizer)
    assert launches == [(3 * count,)] * 2


def test_each_combination_of_dtypes_is_one_launch(launches, backend):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    params = [torch.nn.Parameter(torch.randn(3).to(dtype)) for dtype in dtypes * 2]
    optimizer = FusedPadam(params, backend=backend)
    for param in params:
        param.grad = torch.ones_like(param)
    step_and_check(optimizer)
    assert launches == [(2,)] * 3


def test_nothing_is_launched_for_empty_tensors(launches, backend):
    param = torch.nn.Parameter(torch.empty(0))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.empty(0)
    optimizer.step()
    assert launches == []


@pytest.mark.parametrize("partial", [1 / 8, 0.3])
def test_seams_between_chunks_of_several_blocks(partial, launches, backend):
    # 48 blocks: chunks of three, since the CPU counts as one processor.
    sizes = [1024 * 40 + 300, 1024 * 2, 1024 * 2 + 1, 1024 * 2 - 1]
    params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = FusedPadam(params, weight_decay=0.1, partial=partial, backend=backend)
    for param in params:
        param.grad = torch.randn_like(param)
    step_and_check(optimizer)
    assert launches == [(14 + 1 + 1 + 1,)]


@pytest.mark.parametrize("shift", [0, 4, 1], ids=["aligned", "aligned inside", "not aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_whole_blocks_and_tails_write_nowhere_else(dtype, shift, backend):
    sentinel, size = 77.0, 1024 * 2 + 37
    kinds = (dtype, dtype, *[torch.float32] * 3)
    buffers = [torch.full((size + 64,), sentinel, dtype=kind) for kind in kinds]
    start = 16 + shift  # 16 elements keep every dtype aligned
    views = [buffer[start : start + size] for buffer in buffers]
    for view in views:
        view.zero_()
    views[0].copy_(torch.randn(size))
    views[1].copy_(torch.randn(size))
    param = torch.nn.Parameter(views[0])
    param.grad = views[1]
    optimizer = FusedPadam([param], weight_decay=0.1, backend=backend)
    optimizer.state[param] = {
        "step": torch.tensor(0.0),
        **dict(zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), views[2:], strict=True)),
    }
    step_and_check(optimizer)
    assert optimizer.state[param]["exp_avg"].data_ptr() == views[2].data_ptr()
    for buffer in buffers:
        assert (buffer[:start] == sentinel).all()
        assert (buffer[start + size :] == sentinel).all()


def test_random_numbers_of_chunks_differ(backend):
    param = torch.nn.Parameter(torch.zeros(2 * 1024))  # two chunks, alike but for their places
    param.grad = torch.rand(1024).repeat(2)
    optimizer = FusedPadam([param], state_dtype="packed32", backend=backend)
    optimizer.step()
    one, other = optimizer.state[param]["packed_mvh"].view(2, 1024)
    assert not torch.equal(one, other)


def test_a_launch_that_fails_does_not_count(launches, backend, monkeypatch):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones(3)
    optimizer.step()
    copy = torch.Tensor.copy_

    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    param.grad = torch.ones(3)  # elsewhere, so that the table has to be copied
    with pytest.raises(MemoryError):
        optimizer.step()
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    assert optimizer.state[param]["step"] == 1
    step_and_check(optimizer)


class Table:
    """A table in memory, by hand, of tensors at any address."""

    signature = Signature(tuple(by_slot([torch.float32] * 5, None)), torch.float32)
    limits = prepared_control = row_sources = counters = torch.zeros(1, dtype=torch.float64)
    num_late_rows, counts_on_device = 0, False

    def __init__(self, addresses, numels, chunk_tensors, chunk_first_blocks, blocks_per_chunk):
        self.addresses = torch.zeros(len(SLOTS) * len(numels), dtype=torch.int64)
        self.addresses[: len(addresses)] = torch.tensor(addresses)  # [slot][tensor]
        self.numels = torch.tensor(numels)
        self.salts = self.rows = torch.zeros(len(numels), dtype=torch.int64)
        self.constants = torch.tensor(make_constants(OPTIONS, 1.0), dtype=torch.float64)
        self.control = torch.tensor([1.0, 0.0], dtype=torch.float64)
        self.chunk_tensors = torch.tensor(chunk_tensors)
        self.chunk_first_blocks = torch.tensor(chunk_first_blocks)
        self.num_chunks = len(chunk_tensors)
        self.partial_sums = torch.full((self.num_chunks,), -1.0, dtype=torch.float64)
        self.blocks_per_chunk = blocks_per_chunk

    def launch(self, backend):
        if backend == "triton":
            from padam_ext.kernels import multi_tensor_padam

            multi_tensor_padam.launch(self, self.signature, ROOTS.index("general"))
        else:
            cuda._launch_step(self, ROOTS.index("general"))

    def launch_norm(self, backend):
        if backend == "triton":
            from padam_ext.kernels import multi_tensor_norm

            multi_tensor_norm.launch(self, self.signature)
        else:
            cuda._launch_norm(self)


@pytest.mark.parametrize("aligned", [True, False])
def test_offsets_beyond_two_to_the_31_elements(aligned, backend):
    """A tensor said to begin so far below a small buffer that its last chunk lies inside it."""
    first_block = 2**31 // 1024 + 5
    buffers = [torch.zeros(2048) for _ in range(5)]
    x, g = buffers[:2]
    g.fill_(1.0)
    shift = 0 if aligned else 1
    addresses = [b.data_ptr() + 4 * (shift - first_block * 1024) for b in buffers]
    Table(addresses, [first_block * 1024 + 1030], [0], [first_block], 2).launch(backend)
    assert (x[shift : shift + 1030] == -1).all()
    assert (x[:shift] == 0).all()
    assert (x[shift + 1030 :] == 0).all()


@pytest.mark.parametrize("aligned", [True, False])
def test_the_norm_takes_offsets_beyond_two_to_the_31_elements(aligned, backend):
    first_block = 2**31 // 1024 + 5
    g = torch.full((2048,), float("nan"))
    shift = 0 if aligned else 1
    g[shift : shift + 1030] = 3.0
    addresses = [0, g.data_ptr() + 4 * (shift - first_block * 1024), 0, 0, 0]
    table = Table(addresses, [first_block * 1024 + 1030], [0], [first_block], 2)
    table.launch_norm(backend)
    assert table.partial_sums.tolist() == [9 * 1030]


@pytest.mark.parametrize("slot", range(5))
def test_one_slot_is_not_aligned(slot, backend):
    """Interpreted, Triton takes any address; test_triton.py looks at its blocks."""
    size = 2 * 1024 + 5
    buffers = [torch.zeros(size + 16) for _ in range(5)]
    views = [b[int(i == slot) :][:size] for i, b in enumerate(buffers)]
    views[1].fill_(1.0)
    Table([view.data_ptr() for view in views], [size], [0], [0], 3).launch(backend)
    assert (views[0] == -1).all()


SOME = settings(
    deadline=None,
    max_examples=10 if SLOWLY else 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # `backend` stays as it is
)
# Sizes and places in a buffer, then blocks for each chunk.
LISTS_OF_TENSORS = (
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 3),
)


def chunks_of(sizes, blocks_per_chunk):
    return [
        (tensor, first)
        for tensor, size in enumerate(sizes)
        for first in range(0, -(-size // 1024), blocks_per_chunk)
    ]


@SOME
@given(*LISTS_OF_TENSORS)
def test_every_element_is_stepped_once(backend, tensors, blocks_per_chunk):
    buffers = [[torch.zeros(size + 16) for _ in range(5)] for size, _ in tensors]
    for slots in buffers:
        slots[1].fill_(1.0)
    addresses = [
        slots[slot].data_ptr() + 4 * shift
        for slot in range(5)
        for slots, (_, shift) in zip(buffers, tensors, strict=True)
    ]
    sizes = [size for size, _ in tensors]
    chunks = chunks_of(sizes, blocks_per_chunk)
    Table(addresses, sizes, *zip(*chunks, strict=True), blocks_per_chunk).launch(backend)
    for (x, *_), (size, shift) in zip(buffers, tensors, strict=True):
        assert (x[:shift] == 0).all()
        assert (x[shift : shift + size] == -1).all()
        assert (x[shift + size :] == 0).all()


@SOME
@given(*LISTS_OF_TENSORS)
def test_the_norm_takes_every_element_once(backend, tensors, blocks_per_chunk):
    grads = [torch.full((size + 16,), float("nan")) for size, _ in tensors]
    for grad, (size, shift) in zip(grads, tensors, strict=True):
        grad[shift : shift + size] = 1.0
    begins = [g.data_ptr() + 4 * shift for g, (_, shift) in zip(grads, tensors, strict=True)]
    sizes = [size for size, _ in tensors]
    empty = [0] * len(tensors)
    chunks = chunks_of(sizes, blocks_per_chunk)
    table = Table(empty + begins + empty * 3, sizes, *zip(*chunks, strict=True), blocks_per_chunk)
    table.launch_norm(backend)
    for tensor, size in enumerate(sizes):
        of_tensor = [chunk == tensor for chunk, _ in chunks]
        assert table.partial_sums[of_tensor].sum() == size
