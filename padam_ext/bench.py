"""`python -m padam_ext bench`: a step of FusedPadam beside torch's fused AMSGrad, on your shapes.

Both take turns, so that a change of the machine's speed meets them alike. benchmarks/ in the
source tree measures more.
"""

from __future__ import annotations

import argparse
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from statistics import quantiles

import torch
from torch.nn import Parameter
from torch.optim import Adam, Optimizer

from padam_ext import choice, native
from padam_ext.optimizer import FusedPadam
from padam_ext.options import DEFAULTS, number

DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}  # fmt: skip
# 16M elements, most of them in few tensors, as in a small transformer.
DEFAULT_SHAPES = "12*1024x1024,4*1024x1024,64*1024"
_LR = 1e-3  # betas and eps have the same defaults in both
# Each takes so many turns, of so many parts. One part is at least one step.
_TURNS, _PARTS, _SECONDS_PER_PART = 8, 10, 0.03

Shapes = list[tuple[int, ...]]


def shapes(text: str) -> Shapes:
    """The shapes that an argument lists, as in "4096x4096,12*1024"; 12 times the last one."""
    found: Shapes = []
    for item in text.split(","):
        match = re.fullmatch(r"(?:([1-9]\d*)\*)?([1-9]\d*(?:x[1-9]\d*)*)", item.strip())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"a shape must be as 4096x4096, 1024 or 12*1024x1024, got {item!r}"
            )
        count, shape = match.groups()
        if max(int(count or 1), *map(int, shape.split("x"))) >= 2**31:
            raise argparse.ArgumentTypeError(f"no number may be 2**31 or more, got {item!r}")
        found += int(count or 1) * [tuple(map(int, shape.split("x")))]
    return found


def partial(text: str) -> float:
    """An exponent, as in 0.125 or 1/8."""
    try:
        return number("p", float(Fraction(text)), most=0.5)
    except ArithmeticError as error:
        raise argparse.ArgumentTypeError(f"p must be in [0, 0.5], got {text!r}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes."""
    parser.epilog = (
        "The table has the median, the least and the middle half of the times; the bytes that a "
        "step must move over the median; and the median relative to FusedPadam's."
    )
    parser.add_argument(
        "--shapes",
        type=shapes,
        default=DEFAULT_SHAPES,
        help="of the parameters, as in 4096x4096,12*1024; default %(default)s",
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32", help="default %(default)s"
    )
    parser.add_argument(
        "--partial",
        type=partial,
        default=DEFAULTS["partial"],
        help="Padam's p, as 0.125 or 1/8; default %(default)s",
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Verifies, measures and prints a table; ends the program where that cannot be done."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[arguments.dtype]
    # That bfloat16 parameters lose small steps does not matter here.
    warnings.filterwarnings("ignore", "bfloat16 parameters are rounded", UserWarning)
    try:
        torch.zeros(1, device=device).item()
        verify(arguments.shapes, dtype, device)
        first = {
            f"FusedPadam, p={arguments.partial:g}": FusedPadam(
                make_params(arguments.shapes, dtype, device), lr=_LR, partial=arguments.partial
            ),
            "torch AMSGrad, fused": amsgrad(make_params(arguments.shapes, dtype, device)),
        }
        steps = {name: optimizer.step for name, optimizer in first.items()}
        measured = measure(steps, torch.device(device))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        parser.error(f"cannot be measured on {device}: {str(error).splitlines()[0]}")
    for line in table(measured, list(first.values())):
        print(line)
    print("`times` is relative to FusedPadam. Other work on this machine can make steps many times")
    print("as long: look at the least as well, and run it twice.")


def make_params(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Parameter]:
    """Parameters with gradients, the same for each optimizer."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        empty = torch.empty(shape, dtype=dtype, device=device)
        return empty.uniform_(-1, 1, generator=generator)

    params = [Parameter(random(shape)) for shape in shapes]
    for param in params:
        param.grad = random(tuple(param.shape))
    return params


def amsgrad(params: list[Parameter]) -> Adam:
    """What most would take instead."""
    return Adam(params, amsgrad=True, fused=True, lr=_LR)


def verify(shapes: Shapes, dtype: torch.dtype, device: str) -> None:
    """Holds the first step at p = 1/2, where both compute the same, against each other.

    Raises:
        AssertionError: they differ by more than rounding explains.
    """
    tried = sorted(set(shapes), key=math.prod)[:4]
    ours = make_params(tried, dtype, device)
    wide = torch.promote_types(dtype, torch.float32)  # torch rounds moments of half types, too
    theirs = [Parameter(param.detach().to(wide, copy=True)) for param in ours]
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        other.grad = one.grad.to(wide)
    FusedPadam(ours, lr=_LR, partial=0.5, bias_correction="adam").step()
    amsgrad(theirs).step()
    unit = torch.finfo(dtype).eps
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=unit, atol=0.01 * _LR)


def measure(
    steps: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, list[float]]:
    """Seconds of a step, by turns. Steps follow one another; a GPU is waited for at the end."""

    def seconds(step: Callable[[], object], count: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        _wait(device)
        return (time.perf_counter() - start) / count

    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        seconds(step, 2)  # makes states and compiles kernels
    counts = {name: max(1, round(_SECONDS_PER_PART / seconds(step, 3)))
              for name, step in steps.items()}  # fmt: skip
    for _ in range(_TURNS):
        for name, step in steps.items():
            times[name] += [seconds(step, counts[name]) for _ in range(_PARTS)]
    return times


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bytes_of_a_step(optimizer: Optimizer) -> int:
    """What a step must move: gradients are read; parameters and states also written."""
    params: list[Parameter] = optimizer.param_groups[0]["params"]
    states = [
        value
        for param in params
        for value in optimizer.state[param].values()
        if isinstance(value, torch.Tensor) and value.numel() == param.numel() and value.dim()
    ]
    return sum(3 * p.nbytes for p in params) + sum(2 * state.nbytes for state in states)


def table(times: dict[str, list[float]], optimizers: list[Optimizer]) -> list[str]:
    """One row for each optimizer, and above them what was measured."""
    params = optimizers[0].param_groups[0]["params"]
    where = params[0].device
    machine = f"{where}, {torch.get_num_threads()} threads"
    if where.type == "cuda":
        machine = torch.cuda.get_device_name(where)
    backend = choice.choose("auto", where).name
    if backend == "cpu":
        backend = f"cpu, {native.simd_level()}"
    tensors = "1 tensor" if len(params) == 1 else f"{len(params)} tensors"
    lines = [
        f"{tensors}, {sum(p.numel() for p in params):,} elements of {params[0].dtype}; "
        f"{machine}; torch {torch.__version__}",
        f"FusedPadam's backend: {backend}",
        f"{'':<24} {'ms a step':>11} {'least':>9} {'middle half':>19} {'GB/s':>9} {'times':>7}",
    ]
    ours = None
    for (name, each), optimizer in zip(times.items(), optimizers, strict=True):
        low, median, high = quantiles(each, n=4)
        ours = ours or median
        lines.append(
            f"{name:<24} {median * 1e3:>11.4g} {min(each) * 1e3:>9.3g} "
            f"{f'{low * 1e3:.3g} to {high * 1e3:.3g}':>19} "
            f"{bytes_of_a_step(optimizer) / median / 1e9:>9.3g} {median / ours:>7.2f}"
        )
    return lines
