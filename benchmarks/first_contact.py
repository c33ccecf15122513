"""The first half hour with a GPU: what it is, whether steps are right, the tests, then speed.

    python -m benchmarks.first_contact --out DIR [--done DIR ...] [--seconds 520]

What is worth most comes first, and each result is written to DIR/results.jsonl as soon as it is
known. A call ends before --seconds; the next one goes on where it ended, even if it was killed.
Results in other folders count as done, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import contact_rows, measure
from benchmarks.versions import installed
from padam_ext import FusedPadam, available_backends

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One thing to do.

    Attributes:
        name: by which it is known to be done.
        seconds: what it may take.
        run: does it.
    """

    name: str
    seconds: float
    run: Callable[[], Result]


class Card:
    """The GPU; a test has another one in its place."""

    device = torch.device("cuda")
    test_command = (sys.executable, "-m", "pytest", "-W", "default", "-m", "gpu", "--tb=long")
    test_seconds = 280

    def kernels(self) -> list[str]:
        """Backends of FusedPadam with a kernel that can run here."""
        return [name for name in ("triton", "cuda") if name in available_backends()]

    def describe(self) -> Result:
        """Driver, clocks and limits, as NVIDIA's tool has them."""
        fields = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
        return {
            "nvidia-smi": _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv"),
            "capability": torch.cuda.get_device_capability(),
            "processors": torch.cuda.get_device_properties(0).multi_processor_count,
        }

    def memory(self) -> int:
        """Free bytes."""
        return torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        """Gives memory of the row before back."""
        torch.cuda.empty_cache()


def _output(*command: str) -> str:
    """What a program prints; a word of why where it is not there."""
    if shutil.which(command[0]) is None:
        return "not installed"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def versions(card: Card) -> Result:
    """What is installed."""
    packages = ("padam_ext", "torch", "triton", "setuptools", "pytest", "pybind11", "cmake")
    return {
        "Python": platform.python_version(),
        **installed(packages),
        "CUDA of torch": torch.version.cuda,
        "nvcc": _output("nvcc", "--version").rpartition("\n")[2],
        "backends": available_backends(),
        **card.describe(),
    }


def smoke(card: Card) -> Result:
    """Three steps of a few tensors by each kernel, beside PyTorch's operations on the CPU."""
    found = {}
    for kernel in card.kernels():
        ends = []
        for device, backend in ((torch.device("cpu"), "eager"), (card.device, kernel)):
            generator = torch.Generator().manual_seed(0)
            values = [torch.randn(n, generator=generator) for n in (1, 1000, 5000, 100_003)]
            params = [torch.nn.Parameter(value.to(device)) for value in values]
            optimizer = FusedPadam(params, weight_decay=0.1, max_grad_norm=1.0, backend=backend)
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator).to(device)
                optimizer.step()
            ends.append(torch.cat([param.detach().cpu() for param in params]))
        difference = (ends[0] - ends[1]).abs().max().item()
        first = [round(x, 6) for x in ends[1][:4].tolist()]
        found[kernel] = {"largest difference": difference, "first": first}
        if not difference < 1e-5:
            raise AssertionError(f"{kernel}: parameters differ by {difference}, begin with {first}")
    return found


def tests(card: Card, out: Path) -> Result:
    """The suite's GPU tests, stopped in time so that the report is written."""
    report, log = out / "tests.xml", out / "tests.log"
    command = [*card.test_command, f"--junitxml={report}"]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(card.test_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return {"exit": process.returncode, "last line": log.read_text().strip().rpartition("\n")[2]}


def stages(card: Card, out: Path) -> Iterator[Stage]:
    """All of them, most valuable first."""
    yield Stage("versions", 20, lambda: versions(card))
    yield Stage("smoke", 60, lambda: smoke(card))
    yield Stage("tests", card.test_seconds + 30, lambda: tests(card, out))
    yield Stage("copy bandwidth", 10, lambda: {"GB/s": measure.copy_bandwidth() / 1e9})
    for row in contact_rows.rows(card.kernels(), card.device, card.memory()):
        yield Stage(row.name, row.seconds, row.measure)


def done_in(folders: list[Path]) -> dict[str, Result]:
    """Results by stage. A line that a killed call left unfinished does not count."""
    found = {}
    for folder in folders:
        path = folder / "results.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[entry["stage"]] = entry
    return found


def write(out: Path, entry: Result) -> None:
    """Adds a result, for good: the next moment may be the last."""
    path = out / "results.jsonl"
    # Behind a line that was cut off.
    begin = "" if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n") else "\n"
    with path.open("a") as file:
        file.write(begin + json.dumps(entry, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def main(card: Card | None = None) -> int:
    """Does what is left, as far as the time goes; 0 if nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where results go")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="folders of other calls")
    parser.add_argument("--seconds", type=float, default=520, help="default %(default)s")
    arguments = parser.parse_args()
    card = card or Card()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    done = done_in([*arguments.done, out])
    for stage in stages(card, out):
        if stage.name in done:
            continue
        if time.monotonic() + stage.seconds > end:
            print(f"No time left for {stage.name!r}: call again")
            return 3
        print(f"{stage.name} ...", flush=True)
        start = time.monotonic()
        try:
            result = stage.run()
        except Exception as error:  # what comes after may still work
            result = {"error": f"{type(error).__name__}: {error}"}
        card.release()
        entry = {"stage": stage.name, "took": round(time.monotonic() - start, 1), **result}
        write(out, entry)
        print(json.dumps(entry, default=str), flush=True)
    print(f"All done: {out / 'results.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
