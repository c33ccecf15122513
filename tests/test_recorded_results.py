"""Results of 200 random runs are bitwise what they were when recorded_results.json was made.

A run is one optimizer with a few groups of parameters of any dtypes, shapes and layouts, and some
steps. To record anew, after a change that is meant to change results::

    RECORD_RESULTS=1 python -m pytest -p no:xdist tests/test_recorded_results.py
    RECORD_RESULTS=1 TRITON_INTERPRET=1 python -m pytest -p no:xdist tests/test_recorded_results.py

Results of the cpu backend depend on nothing but its SIMD level. Those of the others come from
operations of torch and numpy, too, and are compared where their versions and the processor's
capability are the recorded ones.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from checking import INTERPRETED
from padam_ext import FusedPadam

FILE = Path(__file__).with_name("recorded_results.json")
RECORDING = os.environ.get("RECORD_RESULTS") == "1"
NUM_RUNS = 200
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
COUNTS_ON_DEVICE = ("triton", "cuda")


class Draw:
    """Random choices and numbers that are the same on every machine and with every version.

    numpy keeps the stream of RandomState as it is for ever; torch's depends on the processor.
    """

    def __init__(self, seed):
        self.state = np.random.RandomState(seed)

    def one_of(self, *values):
        return values[self.state.randint(len(values))]

    def chance(self, probability):
        return bool(self.state.random_sample() < probability)

    def values(self, shape, dtype):
        """Numbers around zero, of the magnitude of 1."""
        if dtype.is_complex:
            return torch.complex(*(self.values(shape, dtype.to_real()) for _ in range(2)))
        uniform = self.state.random_sample((3, *shape)) - 0.5
        return torch.tensor(uniform.sum(0) * 2.0, dtype=torch.float64).to(dtype)

    def layout(self, values):
        """The same values somewhere else in memory."""
        kind = self.one_of("dense", "dense", "transposed", "gaps", "transposed gaps", "misaligned")
        if "transposed" in kind:
            order = self.state.permutation(values.dim()).tolist()
            values = values.permute(order).contiguous().permute(np.argsort(order).tolist())
        if "gaps" in kind and values.dim() > 0:
            base = torch.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1), dtype=values.dtype)
            if values.dim() == 2 and kind == "transposed gaps":
                base = torch.zeros(
                    (2 * values.shape[1] + 1, values.shape[0]), dtype=values.dtype
                ).t()
            return base[..., 1::2].copy_(values)
        if kind == "misaligned":
            flat = torch.zeros(values.numel() + 20, dtype=values.dtype)
            offset = self.state.randint(1, 16)
            return flat[offset : offset + values.numel()].view(values.shape).copy_(values)
        return values.clone(memory_format=torch.preserve_format)


def draw_shape(draw, largest):
    shape = draw.one_of(
        (), (0,), (1,), (3,), (17,), (64,), (131,), (1000,), (2, 3), (5, 5), (9, 31), (3, 1, 40),
        (4, 3, 5, 6), (3000,), (70, 61),
    )  # fmt: skip
    return shape if np.prod(shape) <= largest else (40,)


def draw_options(draw):
    return {
        "lr": draw.one_of(0.1, 0.1, 1e-3, 0.05, 3.0, 0.0, torch.tensor(0.02)),
        "betas": draw.one_of((0.9, 0.999), (0.9, 0.999), (0.0, 0.99), (0.77, 0.9123), (0.9, 0.0)),
        "eps": draw.one_of(1e-8, 1e-8, 1e-3, 0.0),
        "weight_decay": draw.one_of(0.0, 5e-4, 0.1, torch.tensor([0.05], dtype=torch.float64)),
        "partial": draw.one_of(0.125, 0.125, 0.0, 0.0625, 0.25, 0.5, 0.2, 0.3, 0.4),
        "amsgrad": draw.chance(0.8),
        "bias_correction": draw.one_of("none", "authors", "adam"),
        "decoupled_weight_decay": draw.chance(0.3),
        "maximize": draw.chance(0.2),
    }


class Run:
    """One optimizer, drawn at random. What it is made of is drawn before anything is stepped."""

    def __init__(self, number, backend):
        self.draw = draw = Draw(number)
        self.traits = []
        groups = []
        largest = 5000 if draw.chance(0.2) and not INTERPRETED else 400
        dtypes = [draw.one_of(*DTYPES) for _ in range(draw.one_of(1, 1, 2, 3))]
        for _ in range(draw.one_of(1, 1, 2, 4)):
            params = []
            for _ in range(draw.one_of(1, 2, 4)):
                values = draw.values(draw_shape(draw, largest), draw.one_of(*dtypes))
                params.append(torch.nn.Parameter(draw.layout(values)))
                if values.dtype in DTYPES[2:4] and draw.chance(0.2):
                    params[-1].grad_dtype = torch.float32
            groups.append({"params": params, **draw_options(draw)})
        self.params = [param for group in groups for param in group["params"]]
        whole = {}
        if draw.chance(0.3):
            whole["max_grad_norm"] = draw.one_of(0.01, 1.0, 1e6, torch.inf)
        if draw.chance(0.1):
            whole["skip_nonfinite"] = True
        self.scaling = draw.one_of(None, None, None, "scaled", "unscaled before")
        self.one_by_one = not whole and self.scaling is None and draw.chance(0.2)
        capturable = draw.chance(0.1)
        if capturable and backend in COUNTS_ON_DEVICE:
            whole["capturable"] = True
        # An infinity that decoupled decay multiplies is for test_edges.py.
        self.with_infinities = draw.chance(0.15) and not any(
            group["decoupled_weight_decay"] for group in groups
        )
        self.optimizer = FusedPadam(groups, backend=backend, **whole)
        self.name = " ".join(
            [
                f"run {number}:",
                *sorted({str(param.dtype).removeprefix("torch.") for param in self.params}),
                *(f"p={group['partial']:g}" for group in groups),
                *sorted({group["bias_correction"] for group in groups}),
                *(f"{key}={value}" for key, value in whole.items()),
                *(["capturable for devices"] if capturable else []),
                *([f"gradients {self.scaling}"] if self.scaling else []),
                *(["step_param"] if self.one_by_one else []),
                *(["infinities"] if self.with_infinities else []),
            ]
        )

    def set_gradients(self):
        draw = self.draw
        for param in self.params:
            param.grad = None
            if draw.chance(0.15):
                continue
            dtype = param.grad_dtype
            grad = draw.values(param.shape, dtype) * 2.0 ** draw.one_of(-12, -5, -1, 0, 3)
            grad[draw.values(param.shape, torch.float32) > 0.9] = 0
            if self.with_infinities and draw.chance(0.3):
                at = draw.values(param.shape, torch.float32) > 1.2
                grad[at] = draw.one_of(torch.inf, -torch.inf, torch.nan, 1e-42)
            grad = draw.layout(grad)
            param.grad = grad.conj() if dtype.is_complex and draw.chance(0.3) else grad

    def change_options(self):
        group = self.draw.one_of(*self.optimizer.param_groups)
        if self.draw.chance(0.5):
            group["lr"] = group["lr"] * 0.7
        if self.draw.chance(0.1):
            group["betas"] = (0.8, 0.95)

    def step(self):
        self.change_options()
        self.set_gradients()
        if self.one_by_one:
            for param in self.params:
                self.optimizer.step_param(param)
            return
        if self.scaling is not None:  # as GradScaler does
            scale = torch.tensor(self.draw.one_of(1024.0, 3.0, 0.37))
            self.optimizer.grad_scale = scale if self.scaling == "scaled" else None
            self.optimizer.found_inf = torch.tensor(float(self.draw.chance(0.3)))
        self.optimizer.step()
        if self.scaling is not None:
            del self.optimizer.grad_scale, self.optimizer.found_inf

    def digest(self):
        """Of everything that the steps changed; every NaN counts as the same."""
        state = self.optimizer.state
        results = [self.optimizer.grad_norm, self.optimizer.skipped_steps]
        for param in self.params:
            results.append(param)
            its = state.get(param, {})
            results += [its.get(key) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
            results.append(float(its.get("step", 0)))
        hashed = hashlib.sha256()
        for value in results:
            is_tensor = isinstance(value, torch.Tensor)
            hashed.update(as_bytes(value) if is_tensor else repr(value).encode())
        return hashed.hexdigest()[:8]


def as_bytes(tensor):
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    what = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return what + tensor.flatten().view(torch.uint8).numpy().tobytes()


def platform():
    """What results depend on where operations of torch and numpy take part."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def test_results_are_as_recorded(backend, request):
    variant = request.node.callspec.params["backend"]
    names, digests = [], []
    for number in range(NUM_RUNS):
        run = Run(number, backend)
        for _ in range(run.draw.one_of(1, 2, 3, 5)):
            run.step()
        names.append(run.name)
        digests.append(run.digest())
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    if RECORDING:
        recorded[variant] = {"platform": platform(), "digests": " ".join(digests)}
        FILE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        return
    if variant not in recorded:
        pytest.skip(f"nothing is recorded for {variant}")
    there = recorded[variant]
    if backend != "cpu" and there["platform"] != platform():
        pytest.skip(f"recorded on {there['platform']}, this is {platform()}")
    expected = there["digests"].split()
    runs = zip(names, digests, expected, strict=True)
    others = [name for name, digest, then in runs if digest != then]
    assert not others, f"{len(others)} results are not as recorded:\n" + "\n".join(others)
