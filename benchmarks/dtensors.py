"""Time of a clipped step of 500 DTensors in two gloo processes: `python -m benchmarks.dtensors`.

Each process has one thread. Ways take turns; the medians of the slower process are shown, in
milliseconds. Before anything is timed, all ways that clip must agree.
"""

import os
import statistics
import sys
import tempfile
import time
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from padam_ext import FusedPadam

PROCESSES, TENSORS, SHAPE, MAX_NORM, TURNS = 2, 500, (64, 16), 0.7, 30
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
AS_AMSGRAD = {"partial": 0.5, "bias_correction": "adam"}
CLIPPED_BY_TORCH = "clip_grad_norm_, then FusedPadam"
CLIPPED_BY_US = "FusedPadam(max_grad_norm)"


def make_params(mesh):
    """Parameters with gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def sharded():
        return distribute_tensor(torch.randn(SHAPE, generator=generator), mesh, [Shard(0)])

    params = [nn.Parameter(sharded()) for _ in range(TENSORS)]
    for param in params:
        param.grad = sharded()
    return params


def make_ways(mesh):
    """By name a function that makes one step, and the parameters that it steps."""

    def way(make_optimizer, clip=False):
        params = make_params(mesh)
        optimizer = make_optimizer(params)

        def step():
            if clip:
                nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()

        return step, params

    def padam(params, **options):
        return FusedPadam(params, **OPTIONS, **AS_AMSGRAD, **options)

    def adam(params):
        return torch.optim.Adam(params, **OPTIONS, amsgrad=True, fused=True)

    return {
        "clip_grad_norm_, then Adam(amsgrad, fused)": way(adam, clip=True),
        CLIPPED_BY_TORCH: way(padam, clip=True),
        CLIPPED_BY_US: way(lambda params: padam(params, max_grad_norm=MAX_NORM)),
        "FusedPadam, no clipping": way(padam),
    }


def measure(rank, folder):
    """In each process; the first prints."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    ways = make_ways(init_device_mesh("cpu", (PROCESSES,)))
    for step, _ in ways.values():
        step()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        ways[CLIPPED_BY_US][0]()
    ways[CLIPPED_BY_TORCH][0]()
    for one, other in zip(ways[CLIPPED_BY_TORCH][1], ways[CLIPPED_BY_US][1], strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=1e-4, atol=1e-5)
    times = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, (step, _) in ways.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(of_one) * 1e3 for of_one in times.values()])
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    if rank == 0:
        report(dict(zip(ways, medians.tolist(), strict=True)), all_reduce.call_count)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive the interpreter


def report(medians, collectives):
    """A table of them."""
    table = Table(title=f"One step of {TENSORS} DTensors {SHAPE} in {PROCESSES} processes")
    table.add_column("way")
    table.add_column("ms", justify="right")
    table.add_column(f"/ {CLIPPED_BY_US}", justify="right")
    for name, median in medians.items():
        table.add_row(name, f"{median:.2f}", f"{median / medians[CLIPPED_BY_US]:.2f}")
    console = Console()
    console.print(table)
    console.print(f"{CLIPPED_BY_US} makes {collectives} all_reduce.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        torch.multiprocessing.spawn(measure, (temporary,), nprocs=PROCESSES)
