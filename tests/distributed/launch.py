"""Runs a function in several processes that talk over gloo, and never for longer than it may."""

import os
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist


def in_processes(count, work, *args, seconds=240):
    """Calls `work(rank, *args)` in each of them. One that waits for ever fails the test."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.multiprocessing.spawn(
            _enter, (count, folder, work, args), nprocs=count, join=False
        )
        while not processes.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                for process in processes.processes:
                    process.kill()
                pytest.fail(f"{count} processes did not end within {seconds} s")


def _enter(rank, count, folder, work, args):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()
    # While an interpreter ends, threads of gloo may ask it for something yet, and then the process
    # aborts (PyTorch's issue 190489): it ends without that.
    sys.stdout.flush()
    os._exit(0)
