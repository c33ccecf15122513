"""Options of the benchmarks, and what the report says of the machine."""

import gc
import platform
import sys

import pytest
import torch

from benchmarks import measure
from benchmarks.versions import installed
from padam_ext.backends import BACKENDS
from padam_ext.native import simd_level

PACKAGES = ("padam_ext", "torch", "triton", "pytorch-optimizer", "torch-optimi")


def pytest_addoption(parser):
    """How much is measured."""
    parser.addoption("--turns", type=int, default=6, help="of each implementation (default 6)")
    parser.addoption(
        "--every-dtype", action="store_true", help="bfloat16 for all workloads (default on a GPU)"
    )


def pytest_configure(config):
    """Without a kernel there is nothing to measure."""
    kernels = [b for b in BACKENDS if b.is_for(measure.DEVICE) and b.name != "eager"]
    if all(b.unavailable_reason() for b in kernels):
        reasons = "; ".join(f"{b.name}: {b.unavailable_reason()}" for b in kernels)
        raise pytest.UsageError(f"no kernel of padam_ext can run on {measure.DEVICE} ({reasons})")


@pytest.fixture(scope="session", autouse=True)
def modules_out_of_the_way():
    """What has been imported by now is not looked through again and again for garbage."""
    gc.freeze()


@pytest.fixture(autouse=True)
def free_memory():
    """Of the test before: optimizers are parts of cycles, and a failure keeps all that it saw."""
    sys.last_value = sys.last_traceback = sys.last_exc = None
    gc.collect()


def pytest_benchmark_update_machine_info(config, machine_info):
    """Versions and device, for the report."""
    found = installed(PACKAGES)
    machine_info["versions"] = {"Python": platform.python_version()} | {
        name: found.get(name, "not installed") for name in PACKAGES
    }
    if measure.ON_GPU:
        machine_info["device"] = torch.cuda.get_device_name()
        machine_info["versions"]["CUDA"] = torch.version.cuda
    else:
        cpu = machine_info["cpu"].get("brand_raw") or machine_info["machine"]
        machine_info["device"] = f"{cpu}, {simd_level()}, {torch.get_num_threads()} threads"
