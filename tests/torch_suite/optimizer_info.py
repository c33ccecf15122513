"""What PyTorch's test/test_optim.py checks of its optimizers, for FusedPadam.

That file does not ship with torch, but its table does: an OptimizerInfo for each optimizer, with
inputs for the constructor, in torch.testing._internal.common_optimizers. FusedPadam gets one made
of Adam's. Left out of what that file checks:

- sparse gradients and steps that call the closure several times: only for optimizers that have them
- memory, tensors of 2**32 elements, several GPUs: they need GPUs
- which implementation is the default: there is one
- half types beside Adam's: states are float32 here (test_update.py compares with the oracle)
- the counter follows the default dtype: here it is always float32 (test_checkpoint.py)
"""

import copy
import warnings

import pytest
import torch

from checking import INTERPRETED
from padam_ext import FusedPadam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_optimizers as theirs

AS_ADAM = {"lr": 1e-3, "partial": 0.5, "bias_correction": "adam", "amsgrad": False}
AS = {
    torch.optim.Adam: AS_ADAM,
    torch.optim.AdamW: AS_ADAM | {"weight_decay": 1e-2, "decoupled_weight_decay": True},
}
PEERS = {info.optim_cls: info for info in theirs.optim_db}


def info_like(peer, ours):
    """FusedPadam's OptimizerInfo: all of a peer's, after the given options of FusedPadam's own."""

    def inputs(device, dtype=None):
        return [
            theirs.OptimizerInput(None, ours | case.kwargs, case.desc)
            for case in peer.optim_inputs_func(device, dtype)
        ]

    return theirs.OptimizerInfo(
        FusedPadam,
        optim_inputs_func=inputs,
        optim_error_inputs_func=peer.optim_error_inputs_func,
        scheduler_inputs=peer.scheduler_inputs,
        supported_impls=peer.supported_impls,
        supports_fused_on=peer.supports_fused_on,
        not_og_supported_flags=peer.not_og_supported_flags,
        has_capturable_arg=peer.has_capturable_arg,
    )


INFO = info_like(PEERS[torch.optim.Adam], {"lr": 1e-2})


def inputs_of(info):
    """Those for any device, each with none or one of foreach, fused and differentiable."""
    every = theirs._get_optim_inputs_including_global_cliquey_kwargs
    return {
        case.desc: case.kwargs
        for device in ("cpu", "cuda", "mps")
        for case in every(device, torch.float32, info)
    }


# Why options are left out, as the error says it: with all inputs that have them, and alone where
# the backend is not one for GPUs.
REFUSED = {"differentiable": "a step of FusedPadam cannot be differentiated"}
REFUSED_ON_CPU = {"capturable": "capturable=True needs a kernel for GPUs"}


def reason(kwargs, reasons):
    return next((why for name, why in reasons.items() if kwargs.get(name)), None)


INPUTS = inputs_of(INFO)
RUN = {desc: kwargs for desc, kwargs in INPUTS.items() if not reason(kwargs, REFUSED)}
# Since foreach and fused have no effect, one input with each is enough for `make test`.
CASES = [
    pytest.param(desc, marks=[pytest.mark.slow] * (" & " in desc and "default &" not in desc))
    for desc in RUN
    if not INTERPRETED or desc in ("default", "capturable, amsgrad")  # the interpreter takes long
]


class Given:
    """An input on a backend."""

    def __init__(self, kwargs, backend):
        self.kwargs = kwargs
        self.backend = backend

    def optimizer(self, params, **changes):
        # Schedulers write to a learning rate that is a tensor, so each optimizer has its own.
        return FusedPadam(params, **copy.deepcopy(self.kwargs) | changes, backend=self.backend)

    def group(self, params, **changes):
        """A param group with the options. `capturable` is of the whole optimizer only."""
        kwargs = {k: v for k, v in copy.deepcopy(self.kwargs).items() if k != "capturable"}
        return {"params": params, **kwargs, **changes}

    def trained(self, names=False, steps=3):
        problem = Problem()
        optimizer = self.optimizer(problem.named() if names else problem.params)
        problem.train(optimizer, steps)
        return problem, optimizer


class Problem:
    """A least squares problem. The parameters may be every second element of something larger."""

    def __init__(self, contiguous=True):
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape):
            values = torch.randn(*shape, 2, generator=generator)[..., 0]
            return torch.nn.Parameter(values.contiguous() if contiguous else values)

        self.params = [parameter(10, 5), parameter(10)]
        self.inputs = torch.randn(5, generator=generator)

    def named(self):
        return list(zip(("weight", "bias"), self.params, strict=True))

    def backward(self):
        weight, bias = self.params
        weight.grad = bias.grad = None
        loss = (weight.mv(self.inputs) + bias).square().sum()
        loss.backward()
        return loss

    def train(self, optimizer, steps):
        for _ in range(steps):
            self.backward()
            optimizer.step()

    def copy(self):
        other = copy.copy(self)
        other.params = [torch.nn.Parameter(param.detach().clone()) for param in self.params]
        return other


def assert_equal(actual, expected):
    """Bitwise, of anything that a state_dict holds."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        for item, other in zip(actual, expected, strict=True):
            assert_equal(item, other)
    else:
        assert actual == expected


def without_names(state_dict):
    groups = [
        {k: v for k, v in group.items() if k != "param_names"}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def with_fresh_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, dtype=param.dtype, generator=generator)


def given_to(backend, desc):
    """An input, as far as the backend takes it."""
    left_out = REFUSED_ON_CPU if backend in ("cpu", "eager") else {}
    kwargs = {name: value for name, value in RUN[desc].items() if name not in left_out}
    return Given(kwargs, backend)
