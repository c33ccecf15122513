"""Memory: strides, views, gaps, alignment, complex and lazily conjugated tensors, sentinels."""

import pytest
import torch

from cases import each_dtype
from checking import assert_same, step_and_check
from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.sanitize,
    pytest.mark.gpu_variants,
    pytest.mark.ptx_variants,
]

OPTIONS = {"weight_decay": 0.1, "partial": 0.2}


def gradients_like(param):
    """The same values in several layouts."""
    values = torch.randn(param.shape, dtype=param.dtype)
    yield "contiguous", values.clone()
    if param.dim() == 4:
        yield "channels_last", values.clone(memory_format=torch.channels_last)
    if param.dim() >= 2:
        yield "transposed", values.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((*param.shape[:-1], 2 * param.shape[-1]), torch.nan, dtype=param.dtype)
    wide[..., ::2] = values
    yield "strided", wide[..., ::2]


PARAMS = {
    "contiguous": lambda: torch.randn(4, 3, 5, 6),
    "channels_last": lambda: torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
    "size-1 dims": lambda: torch.randn(4, 1, 1, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(30, 7).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "gaps": lambda: torch.randn(10, 12)[:, 2:9],
    "gaps transposed": lambda: torch.randn(10, 12)[:, 2:9].t(),
    "every third": lambda: torch.randn(60)[::3],
}


@pytest.mark.parametrize("layout", PARAMS)
def test_any_layout_of_parameter_and_gradient(layout, backend):
    torch.manual_seed(0)
    original = PARAMS[layout]()
    for name, _ in gradients_like(original):
        torch.manual_seed(1)
        param = torch.nn.Parameter(original.clone(memory_format=torch.preserve_format))
        if layout.startswith(("gaps", "every")):  # a clone would close the gaps
            param = torch.nn.Parameter(original)
            param.data.copy_(torch.randn(original.shape))
        plain = torch.nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
        optimizer = FusedPadam([param], **OPTIONS, backend=backend)
        expected = FusedPadam([plain], **OPTIONS, backend=backend)
        for _ in range(2):
            param.grad = dict(gradients_like(param))[name]
            plain.grad = param.grad.contiguous()
            expected.step()
            step_and_check(optimizer)
            assert_same(param, plain, backend)
        assert optimizer.state[param]["exp_avg"].shape == param.shape


def test_the_gaps_between_strided_elements_are_left_alone(backend):
    base = torch.full((10, 12), 7.0)
    param = torch.nn.Parameter(base[:, 2:9])
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (base[:, :2] == 7).all()
    assert (base[:, 9:] == 7).all()
    assert (base[:, 2:9] < 7).all()


@pytest.mark.parametrize("name", ["expanded", "overlapping"])
def test_a_parameter_that_shares_memory_with_itself_is_refused(name):
    tensor = {
        "expanded": torch.ones(1).expand(5),
        "overlapping": torch.ones(6).as_strided((4, 3), (1, 1)),
    }[name]
    param = torch.nn.Parameter(tensor)
    with pytest.raises(ValueError, match=r"'weight' of shape .* share memory"):
        FusedPadam([("weight", param)])
    with pytest.raises(ValueError, match=r"parameter 1 of shape .* share memory"):
        FusedPadam([torch.nn.Parameter(torch.ones(2)), param])


def test_interleaved_strides_without_overlap_are_accepted(backend):
    param = torch.nn.Parameter(torch.arange(9.0).as_strided((3, 2), (2, 3)))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.randn(3, 2)
    step_and_check(optimizer)


def test_an_expanded_gradient(backend):
    param = torch.nn.Parameter(torch.randn(6, 5))
    optimizer = FusedPadam([param], backend=backend)
    param.grad = torch.randn(5).expand(6, 5)
    step_and_check(optimizer)


@each_dtype
@pytest.mark.parametrize("offset", range(1, 16))
def test_views_at_every_misalignment_write_nowhere_else(dtype, offset, backend):
    """Every buffer of the step is a view inside a larger one filled with a sentinel."""
    sentinel, size = 77.0, 131
    torch.manual_seed(0)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    buffers = {
        name: torch.full((size + 64,), sentinel, dtype=kind)
        for name, kind in (
            ("param", dtype), ("grad", dtype), ("exp_avg", state_dtype),
            ("exp_avg_sq", state_dtype), ("max_exp_avg_sq", state_dtype),
        )
    }  # fmt: skip
    views = {name: buffer[offset : offset + size] for name, buffer in buffers.items()}
    for view in views.values():
        view.zero_()
    views["param"].copy_(torch.randn(size))
    param = torch.nn.Parameter(views["param"])
    optimizer = FusedPadam([param], **OPTIONS, backend=backend)
    optimizer.state[param] = {
        "step": torch.tensor(0.0),
        **{name: view for name, view in views.items() if "exp_avg" in name},
    }
    param.grad = views["grad"]
    for _ in range(2):
        param.grad.copy_(torch.randn(size))
        step_and_check(optimizer)
    for name, view in views.items():
        if "exp_avg" in name:
            assert optimizer.state[param][name].data_ptr() == view.data_ptr()
    for name, buffer in buffers.items():
        assert (buffer[:offset] == sentinel).all(), name
        assert (buffer[offset + size :] == sentinel).all(), name


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_pairs_of_real_ones(dtype, backend):
    param = torch.nn.Parameter(torch.randn(7, 3, dtype=dtype))
    pairs = torch.nn.Parameter(torch.view_as_real(param.detach()).clone())
    optimizer = FusedPadam([param], **OPTIONS, backend=backend)
    real = FusedPadam([pairs], **OPTIONS, backend=backend)
    for conjugate in (False, True, False):
        values = torch.randn(7, 3, dtype=dtype)
        param.grad = values.conj() if conjugate else values
        assert param.grad.is_conj() == conjugate
        pairs.grad = torch.view_as_real(param.grad.resolve_conj()).clone()
        real.step()
        step_and_check(optimizer)
        assert_same(torch.view_as_real(param.detach()), pairs, backend)
    assert optimizer.state[param]["exp_avg"].dtype == dtype


def test_a_lazily_conjugated_parameter(backend):
    base = torch.randn(5, dtype=torch.complex64)
    param = torch.nn.Parameter(base.conj())
    assert param.is_conj()
    optimizer = FusedPadam([param], **OPTIONS, backend=backend)
    param.grad = torch.randn(5, dtype=torch.complex64)
    step_and_check(optimizer)
    assert torch.equal(base.conj(), param)


def test_a_lazily_negated_gradient(backend):
    param = torch.nn.Parameter(torch.randn(5))
    optimizer = FusedPadam([param], **OPTIONS, backend=backend)
    for _ in range(2):
        param.grad = torch.randn(5, dtype=torch.complex64).conj().imag.contiguous()
        optimizer.step()
        negated = torch.randn(5, dtype=torch.complex64).conj().imag
        assert negated.is_neg()
        param.grad = negated
        step_and_check(optimizer)


where_torch_allows_them = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason="torch has gradients of another dtype from 2.10 on",
)


@where_torch_allows_them
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_another_dtype(dtype, grad_dtype, backend):
    param = torch.nn.Parameter(torch.randn(700).to(dtype))
    param.grad_dtype = grad_dtype
    optimizer = FusedPadam([param], **OPTIONS, backend=backend)
    for _ in range(2):
        param.grad = torch.randn(700).to(grad_dtype)
        if grad_dtype == torch.float64:
            param.grad = param.grad.float().double()
        step_and_check(optimizer)


@where_torch_allows_them
def test_half_gradients_of_full_parameters(backend):
    param = torch.nn.Parameter(torch.randn(700))
    param.grad_dtype = torch.bfloat16
    optimizer = FusedPadam([param], **OPTIONS, backend=backend)
    param.grad = torch.randn(700).bfloat16()
    step_and_check(optimizer)
