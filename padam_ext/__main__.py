"""What is installed, which backends can run here and why others cannot; and a quick benchmark.

python -m padam_ext
python -m padam_ext bench --shapes 4096x4096,1024
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from padam_ext import __version__, bench, native, trial
from padam_ext.backends import BACKENDS


def main() -> None:
    """Carries out a command; without one, shows what is installed."""
    parser = argparse.ArgumentParser(
        prog="python -m padam_ext",
        description="Shows what is installed, which backends can run here and why others cannot.",
    )
    parser.add_argument("--version", action="version", version=f"padam_ext {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands")
    does = "measures a step of FusedPadam beside torch's fused AMSGrad"
    benchmark = commands.add_parser("bench", help=does, description=f"{does}, on your shapes.")
    bench.add_arguments(benchmark)
    arguments = parser.parse_args()
    if arguments.command == "bench":
        bench.run(arguments, benchmark)
    else:
        show()


def show() -> None:
    """Prints versions, devices and backends."""
    print(f"padam_ext  {__version__}")
    print(f"torch      {torch.__version__}")
    print(f"triton     {_version_of('triton')}")
    print(f"python     {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"threads    {torch.get_num_threads()} (torch.set_num_threads changes it)")
    devices = _devices()
    print(f"devices    {', '.join(f'{name} {what}'.strip() for name, what in devices.items())}")
    if native.module is not None:
        levels = ", ".join(native.module.available_simd_levels())
        openmp = "with OpenMP" if native.module.openmp else "without OpenMP: one thread"
        print(f"SIMD       {native.simd_level()} in use (this CPU can run {levels})")
        print(f"native     built by {native.module.compiler}, {openmp}")
        print(f"CUDA       {_cuda_code()}")
    print("\nbackends")
    for backend in BACKENDS:
        takes = (
            "any device"
            if backend.device_types is None
            else ", ".join(sorted(backend.device_types))
        )
        status = f"available, takes tensors on {takes}"
        if (reason := backend.unavailable_reason()) is not None:
            status = f"not available: {reason}"
        print(f"  {backend.name:<8} {status}")
        for device in map(torch.device, devices) if reason is None else ():
            if (
                backend.is_for(device)
                and (broken := trial.broken_reason(backend, device)) is not None
            ):
                print(f"  {'':<8} but not on {device}: {broken}")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda_code() -> str:
    if not hasattr(native.module, "step_cuda"):
        return "not built in"
    return f"code for {native.module.cuda_architectures}, by {native.module.cuda_compiler}"


def _devices() -> dict[str, str]:
    """Devices and what they are."""
    found = {"cpu": ""}
    for kind in (torch.cuda, torch.xpu):
        name = kind.__name__.rpartition(".")[-1]
        count = kind.device_count() if kind.is_available() else 0  # some cannot be initialised
        found |= {f"{name}:{i}": kind.get_device_name(i) for i in range(count)}
    return found


if __name__ == "__main__":
    main()
