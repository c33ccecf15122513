"""The Triton kernel in the interpreter: seams, launches, 64-bit offsets. `make test-interpret`."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checking import step_and_check
from padam_ext import FusedPadam, available_backends, backends, triton_step
from padam_ext.constants import ROOTS, make_constants
from padam_ext.hyperparameters import Hyperparameters

pytestmark = pytest.mark.interpret
OPTIONS = Hyperparameters(1.0, 0.0, 0.999, 1e-8, 0.0, 0.0, True, "none", False, False)


@pytest.fixture
def kernel():
    from padam_ext.kernels import multi_tensor_padam

    triton_step.broken_reason(torch.device("cpu"))  # makes a step of its own, once
    return multi_tensor_padam


@pytest.fixture
def launches(kernel, monkeypatch):
    """Programs of each launch of the kernel."""
    grids = []
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
        {"partial": 0.4, "eps": 1e-2, "amsgrad": False},
        {"partial": 0.5, "maximize": True, "bias_correction": "adam"},
    ]
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(3)) for _ in range(100)], **option}
        for option in options
    ]
    optimizer = FusedPadam(groups, backend=backend)
    for _ in range(2):
        for group in groups:
            for param in group["params"]:
                param.grad = torch.randn(3)
        step_and_check(optimizer)
    assert launches == [(300,), (300,)]


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


@pytest.mark.parametrize("aligned", [True, False])
def test_offsets_beyond_two_to_the_31_elements(aligned, kernel):
    """A tensor said to begin so far below a small buffer that its last chunk lies inside it."""
    first_block = 2**31 // 1024 + 5
    buffers = [torch.zeros(2048) for _ in range(5)]
    x, g = buffers[:2]
    g.fill_(1.0)
    shift = 0 if aligned else 1
    addresses = [b.data_ptr() + 4 * (shift - first_block * 1024) for b in buffers]
    numel = first_block * 1024 + 1030

    table = SimpleNamespace(
        num_chunks=1,
        blocks_per_chunk=2,
        addresses=torch.tensor(addresses),
        numels=torch.tensor([numel]),
        rows=torch.tensor([0]),
        # b1 = 0, p = 0, lr = 1: x = -g
        constants=torch.tensor(make_constants(OPTIONS, 1.0), dtype=torch.float32),
        chunk_tensors=torch.tensor([0]),
        chunk_first_blocks=torch.tensor([first_block]),
    )
    kernel.launch(table, torch.float32, torch.float32, ROOTS.index("general"))
    assert (x[shift : shift + 1030] == -1).all()
    assert (x[:shift] == 0).all()
    assert (x[shift + 1030 :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_the_trial_step_does_not_depend_on_defaults(dtype, monkeypatch):
    monkeypatch.setattr(triton_step, "_works_on", set())
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert triton_step.broken_reason(torch.device("cpu")) is None
    finally:
        torch.set_default_dtype(default)


def test_the_trial_step_is_real_where_tensors_are_fake(monkeypatch):
    monkeypatch.setattr(triton_step, "_works_on", set())
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = FusedPadam([param], backend="triton")
        param.grad = torch.ones(3)
        with pytest.raises(TypeError, match="FakeTensor, a tensor subclass without memory"):
            optimizer.step()


def test_interpreted_only_memory_of_the_cpu_is_taken():
    """Addresses of a GPU's memory would crash the process."""
    with pytest.raises(RuntimeError, match=r"'triton' cannot step .* takes tensors on cpu only"):
        backends.choose("triton", torch.device("cuda"))


def test_tensors_on_the_cpu_are_for_the_cpu_backend_unless_triton_is_asked_for(launches):
    assert available_backends() == ("triton", "cpu", "eager")
    for name, expected in (("auto", 0), ("triton", 1)):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = FusedPadam([param], backend=name)
        param.grad = torch.ones(3)
        optimizer.step()
        assert len(launches) == expected


@pytest.mark.parametrize("misaligned", [None, 0, 1, 2, 3, 4])
def test_unmasked_blocks_are_for_whole_blocks_of_aligned_tensors(
    misaligned, kernel, monkeypatch, backend
):
    """Interpreted, every address works; on a GPU 16-byte accesses elsewhere are an error."""
    blocks = []
    original = kernel.step_block

    def recording(*arguments):
        whole = arguments[-1]
        blocks.append(getattr(whole, "value", whole))
        original(*arguments)

    monkeypatch.setattr(kernel, "step_block", recording)
    size = 2 * 1024 + 5
    buffers = [torch.zeros(size + 16) for _ in range(5)]
    views = [b[int(i == misaligned) :][:size] for i, b in enumerate(buffers)]
    views[0].copy_(torch.randn(size))
    param = torch.nn.Parameter(views[0])
    param.grad = views[1].copy_(torch.randn(size))
    optimizer = FusedPadam([param], backend=backend)
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    optimizer.state[param] = dict(zip(keys, views[2:], strict=True)) | {"step": torch.tensor(0.0)}
    step_and_check(optimizer)
    # The tail takes one element for each of 256 threads.
    assert blocks == ([True, True, False] if misaligned is None else [False] * 9)
