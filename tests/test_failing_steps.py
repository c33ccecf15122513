"""A step whose kernel fails has not counted, and the next one is right."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checking import INTERPRETED, step_and_check
from padam_ext import FusedPadam, native


class KernelError(Exception):
    """Of a kernel."""


def fail(*arguments, **options):
    raise KernelError


class FailsToWrite(TorchDispatchMode):
    """Operations of torch that would write into these tensors fail."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(value):
                    if leaf.untyped_storage()._cdata in self.storages:
                        raise KernelError
        return func(*args, **(kwargs or {}))


def failing_step(optimizer, params, step, monkeypatch):
    """A step during which whatever backend it is cannot compute."""
    written = [*params, *(optimizer.state[p][key] for p in params for key in ("exp_avg",))]
    with monkeypatch.context() as patched:
        if INTERPRETED:
            from triton.runtime import interpreter

            patched.setattr(interpreter.GridExecutor, "__call__", fail)
        elif optimizer.backend != "eager":
            for name in dir(native.module):
                if "step" in name and "steps" not in name:
                    patched.setattr(native.module, name, fail)
        in_torch = FailsToWrite(written) if optimizer.backend == "eager" else nullcontext()
        with pytest.raises(KernelError), in_torch:
            step()


@pytest.mark.parametrize("how", ["step", "step_param", "found_inf", "max_grad_norm"])
@pytest.mark.parametrize("bias_correction", ["none", "adam"])
def test_a_step_that_fails_in_the_kernel_does_not_count(bias_correction, how, backend, monkeypatch):
    # Two buckets: when the first cannot be stepped, both have been counted.
    params = [
        torch.nn.Parameter(torch.randn(size, dtype=dtype))
        for size, dtype in ((5, torch.float32), (40, torch.float32), (7, torch.float64))
    ]
    optimizer = FusedPadam(
        [{"params": [param]} for param in params], bias_correction=bias_correction,
        max_grad_norm=1.0 if how == "max_grad_norm" else None, backend=backend,
    )  # fmt: skip
    for param in params:
        param.grad = torch.randn_like(param)

    def step():
        optimizer.step_param(params[0]) if how == "step_param" else optimizer.step()

    step_and_check(optimizer)
    for _ in range(2):
        if how == "found_inf":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        counts = [float(optimizer.state[param]["step"]) for param in params]
        before = [param.detach().clone() for param in params]
        failing_step(optimizer, params, step, monkeypatch)
        assert [float(optimizer.state[param]["step"]) for param in params] == counts
        assert all(torch.equal(param, was) for param, was in zip(params, before, strict=True))
        optimizer.grad_scale = optimizer.found_inf = None
        step_and_check(optimizer)
