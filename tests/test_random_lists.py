"""Lists of tensors of any shape, dtype and layout, drawn at random."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checking import step_and_check
from padam_ext import FusedPadam

pytestmark = [pytest.mark.numbers, pytest.mark.sanitize, pytest.mark.ptx_variants]

shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4)


@st.composite
def layouts(draw):
    """A parameter of any shape, order of dimensions, offset and gaps, and a gradient likewise."""
    shape = draw(shapes)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64]))

    def tensor():
        order = draw(st.permutations(range(len(shape))))
        pads = [draw(st.integers(0, 2)) for _ in shape]
        base = torch.randn([n + pad for n, pad in zip(shape, pads, strict=True)]).to(dtype)
        base = base.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])
        return base[tuple(slice(pad, None) for pad in pads)]

    return tensor(), tensor()


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pairs=st.lists(layouts(), min_size=1, max_size=6), partial=st.sampled_from([0.125, 0.3]))
def test_any_list_of_any_layouts(pairs, partial, backend):
    params = [torch.nn.Parameter(param) for param, _ in pairs]
    optimizer = FusedPadam(params, weight_decay=0.1, partial=partial, backend=backend)
    for _ in range(2):
        for param, (_, grad) in zip(params, pairs, strict=True):
            param.grad = grad
        step_and_check(optimizer)
