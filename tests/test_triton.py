"""What is peculiar to the Triton kernel in the interpreter. `make test-interpret`."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checking import step_and_check
from padam_ext import FusedPadam, available_backends, backends, choice, trial

pytestmark = pytest.mark.interpret
[TRITON] = (backend for backend in backends.BACKENDS if backend.name == "triton")


@pytest.fixture
def kernel():
    from padam_ext.kernels import multi_tensor_padam

    trial.broken_reason(TRITON, torch.device("cpu"))  # makes a step of its own, once
    return multi_tensor_padam


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_the_trial_step_does_not_depend_on_defaults(dtype, monkeypatch):
    monkeypatch.setattr(trial, "_works_on", set())
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert trial.broken_reason(TRITON, torch.device("cpu")) is None
    finally:
        torch.set_default_dtype(default)


def test_the_trial_step_is_real_where_tensors_are_fake(monkeypatch):
    monkeypatch.setattr(trial, "_works_on", set())
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = FusedPadam([param], backend="triton")
        param.grad = torch.ones(3)
        with pytest.raises(TypeError, match="FakeTensor, a tensor subclass without memory"):
            optimizer.step()


def test_interpreted_only_memory_of_the_cpu_is_taken():
    """Addresses of a GPU's memory would crash the process."""
    with pytest.raises(RuntimeError, match=r"'triton' cannot step .* takes tensors on cpu only"):
        choice.choose("triton", torch.device("cuda"))


def test_tensors_on_the_cpu_are_for_the_cpu_backend_unless_triton_is_asked_for(kernel, monkeypatch):
    launches = []
    original = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *a: (launches.append(a), original(*a)))
    assert available_backends() == ("triton", "cpu", "eager")
    for name, expected in (("auto", 0), ("triton", 1)):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = FusedPadam([param], backend=name)
        param.grad = torch.ones(3)
        optimizer.step()
        assert len(launches) == expected


# Three chunks: of 1024, of 1024, and of 5 elements, of which the last is stepped first. Whether
# gradients are in packs, how many elements of the others, and whether the block is whole.
IN_PACKS = [(True, 4, True), (True, 4, True), (False, 1, False), (False, 4, False)]
ALL_BUT_GRADIENTS = [(False, *rest) for _, *rest in IN_PACKS]
ONE_BY_ONE = [(False, 1, False)] * 9


# A place of 2 is one of 8 bytes, or of 4 in a half type.
@pytest.mark.parametrize(
    ("dtype", "moved", "place", "expected"),
    [
        (torch.float32, None, 0, IN_PACKS),
        *(
            (torch.float32, moved, place, ALL_BUT_GRADIENTS if moved == 1 else ONE_BY_ONE)
            for moved in range(5)
            for place in (1, 2)
        ),
        (torch.bfloat16, 0, 4, IN_PACKS),
        (torch.bfloat16, 1, 4, IN_PACKS),
        *(
            (torch.bfloat16, moved, 2, ALL_BUT_GRADIENTS if moved == 1 else ONE_BY_ONE)
            for moved in range(5)
        ),
    ],
)
def test_packs_are_for_what_is_aligned(dtype, moved, place, expected, kernel, monkeypatch, backend):
    """Interpreted, every address works; on a GPU wide accesses elsewhere are an error."""
    blocks = []
    original = kernel.step_block

    def recording(*arguments):
        width, whole = (getattr(value, "value", value) for value in arguments[-2:])
        grads = bool(getattr(arguments[13], "value", arguments[13]))
        blocks.append((grads, width, whole))
        start, end = (int(arguments[index]) for index in (8, 9))
        assert (end - start) % width == 0
        original(*arguments)

    monkeypatch.setattr(kernel, "step_block", recording)
    size = 2 * 1024 + 5
    buffers = [torch.zeros(size + 16, dtype=dtype) for _ in range(2)]
    buffers += [torch.zeros(size + 16) for _ in range(3)]
    views = [b[place if i == moved else 0 :][:size] for i, b in enumerate(buffers)]
    views[0].copy_(torch.randn(size))
    param = torch.nn.Parameter(views[0])
    param.grad = views[1].copy_(torch.randn(size))
    optimizer = FusedPadam([param], backend=backend)
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    optimizer.state[param] = dict(zip(keys, views[2:], strict=True)) | {"step": torch.tensor(0.0)}
    step_and_check(optimizer)
    assert blocks == expected
