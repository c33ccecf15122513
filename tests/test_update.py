"""Every backend, case and dtype against the oracle: states as well as parameters."""

import pytest
import torch

from cases import EXECUTED, SLOWLY, each_case_and_dtype, each_case_and_storage
from checking import step_and_check
from padam_ext import FusedPadam
from padam_ext.reference import padam_step

pytestmark = [pytest.mark.numbers, pytest.mark.gpu_variants, pytest.mark.ptx_variants]

# Sizes below, at and across vector widths and blocks; fewer where interpretation takes its time.
NUM_STEPS = 2 if EXECUTED else 6
SIZES = (1, 1031) if SLOWLY else (1, 7, 64, 333, 1031)


@each_case_and_dtype
def test_agrees_with_the_oracle(case, dtype, backend):
    run(case, dtype, backend)


@each_case_and_storage
def test_agrees_with_the_oracle_however_it_is_stored(case, storage, backend):
    dtype, options = storage
    run(case, dtype, backend, **options)


@each_case_and_dtype
def test_the_readable_form_agrees_with_the_oracle(case, dtype, monkeypatch):
    """No backend uses padam_step; here it stands in for the form that eager uses."""

    def one_after_the_other(options, grad_factor, packed_maximum, **columns):
        names = [column.removesuffix("s") for column in columns]
        for values in zip(*columns.values(), strict=True):
            arguments = dict(zip(names, values, strict=True))
            padam_step(
                **arguments,
                options=options,
                grad_factor=grad_factor,
                packed_maximum=packed_maximum,
            )

    monkeypatch.setattr("padam_ext.backends.eager.padam_step_foreach", one_after_the_other)
    run(case, dtype, "eager")


@pytest.mark.parametrize("second_moment", ["mean", "yogi"])
@pytest.mark.parametrize("beta2", [0.9, 0.97, 0.999])
def test_many_moments_are_within_the_bound(beta2, second_moment, backend):
    """Roundings of v's terms add up on one element in thousands only."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(1024 if SLOWLY else 50_000))
    options = {"amsgrad": False, "second_moment": second_moment}
    optimizer = FusedPadam([param], betas=(0.9, beta2), backend=backend, **options)
    for _ in range(2):
        param.grad = 3 * torch.randn(param.shape)
        step_and_check(optimizer)


def run(case, dtype, backend, **storage):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]
    optimizer = FusedPadam(params, **case.options, **storage, backend=backend)
    for _ in range(NUM_STEPS):
        for param in params:
            # gradients over many orders of magnitude, among them zeros
            grad = torch.randn(param.shape, dtype=torch.float64)
            grad *= 10.0 ** torch.randint(-4, 1, param.shape)
            grad[torch.rand(param.shape) < 0.05] = 0.0
            param.grad = grad.to(dtype)
        step_and_check(optimizer)
