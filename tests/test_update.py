"""Every backend, case and dtype against the oracle: states as well as parameters."""

import torch

from cases import each_case, each_dtype
from checking import step_and_check
from padam_ext import FusedPadam

NUM_STEPS = 10
SIZES = (1, 7, 64, 333, 1031)  # below, at and across vector widths and blocks


@each_dtype
@each_case
def test_agrees_with_the_oracle(case, dtype, backend):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    params = [torch.nn.Parameter(torch.randn(size, **options).to(dtype)) for size in SIZES]
    optimizer = FusedPadam(params, **case.options, backend=backend)
    for _ in range(NUM_STEPS):
        for param in params:
            # gradients over many orders of magnitude, among them zeros
            grad = torch.randn(param.shape, **options)
            grad *= 10.0 ** torch.randint(-4, 1, param.shape, **options)
            grad[torch.rand(param.shape, **options) < 0.05] = 0.0
            param.grad = grad.to(dtype)
        step_and_check(optimizer)
