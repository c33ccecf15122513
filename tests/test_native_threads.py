"""Threads of the native module, each test in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from padam_ext import native

HERE = Path(__file__).parent


def run_alone(code):
    """Runs code in a process of its own, which is ended if it hangs; what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return result.stdout


FORKS = """
import os, signal
from test_native import native, sum_of_squares, table, tensors
made = [tensors(500_000)]
arguments = table(made) | {"num_threads": 3}
native.module.step_cpu(**arguments)  # makes OpenMP's threads
for slot, new in zip(made[0], tensors(500_000)): slot.copy_(new)
first = sum_of_squares(arguments)
child = os.fork()
if child == 0:
    signal.alarm(60)  # what hangs is ended
    native.module.step_cpu(**arguments)
    same = sum_of_squares(arguments) == first
    grandchild = os.fork()
    if grandchild == 0:
        signal.alarm(60)
        native.module.step_cpu(**arguments)
        os._exit(7)
    os._exit(0 if same and os.waitpid(grandchild, 0)[1] == 7 << 8 else 1)
print(os.waitpid(child, 0)[1])
native.module.step_cpu(**arguments)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have():
    assert run_alone(FORKS) == "0\n"


FLUSHES = """
import torch
from test_native import native, table, tensors

def step(threads):
    made = [slot * 1e-20 for slot in tensors(500_000)]  # squares of gradients are denormal
    for second in made[3:]:
        second.mul_(1e-18)
    native.module.step_cpu(**table([made]) | {"num_threads": threads})
    return torch.stack([made[slot] for slot in (0, 2, 3, 4)]).view(torch.int32)

kept = step(3)  # makes OpenMP's threads
torch.set_flush_denormal(True)
flushed = [step(threads) for threads in (1, 2, 3)]
torch.set_flush_denormal(False)
print(torch.equal(flushed[0], flushed[1]), torch.equal(flushed[0], flushed[2]))
print(torch.equal(flushed[0], kept), torch.equal(step(3), kept))
"""


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="no such mode on this processor")
def test_threads_take_over_how_the_caller_has_denormals():
    """torch.set_flush_denormal is for the thread that calls it; ours are made before, unflushed."""
    assert run_alone(FLUSHES) == "True True\nFalse True\n"


RUNTIMES = """
import torch
from padam_ext import FusedPadam

torch.set_num_threads(2)
param = torch.nn.Parameter(torch.ones(1_000_000))
param.grad = torch.ones_like(param).exp()  # by torch's threads
FusedPadam([param], backend="cpu").step()
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/" in line}
print(*sorted(f for f in files if "omp" in f.rpartition("/")[2]), sep="\\n")
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no list of libraries")
@pytest.mark.skipif(native.module and not native.module.openmp, reason="built without OpenMP")
def test_torch_and_the_native_module_share_one_openmp_runtime():
    """The threads of two would run side by side, and each wait busily for work."""
    assert len(run_alone(RUNTIMES).splitlines()) == 1
