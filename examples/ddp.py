"""Trains a small transformer with DistributedDataParallel, stepping during backward.

    torchrun --nproc-per-node 2 examples/ddp.py

As soon as the gradients of a bucket are averaged over the processes, its parameters are stepped
and the gradients are freed, while backward goes on with the layers before. Where there is a GPU for
each process it uses that, otherwise the CPU.
"""

import argparse

import torch
import torch.distributed as dist
from processes import join_processes
from torch.nn.parallel import DistributedDataParallel

from padam_ext import FusedPadam, step_during_backward
from tiny_transformer import TinyTransformer, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="how many (default: 60)")
    parser.add_argument(
        "--step-after-backward", action="store_true", help="the same training in the usual way"
    )
    options = parser.parse_args()

    device = join_processes()
    try:
        torch.manual_seed(0)
        # A bucket for each few layers, so that there are several in a model this small.
        model = DistributedDataParallel(TinyTransformer().to(device), bucket_cap_mb=0.1)
        optimizer = FusedPadam(model.parameters(), lr=0.1)
        if options.step_after_backward:
            train(model, optimizer, options.steps, device)
        else:
            with step_during_backward(optimizer, ddp=model):
                train(model, optimizer, options.steps, device)
    finally:
        dist.destroy_process_group()


def train(
    model: DistributedDataParallel, optimizer: FusedPadam, steps: int, device: torch.device
) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{processes} processes on {device.type}")
        print(f"{'step':>5} {'loss':>8}  gradients after backward")
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step, rank).to(device))
        loss.backward()
        kept = sum(param.grad is not None for param in model.parameters())
        optimizer.step()  # steps those; during backward there are none left, and hooks run
        if step % 10 == 0 or step == steps - 1:
            total = loss.detach()
            dist.all_reduce(total)
            if rank == 0:
                print(f"{step:5} {total.item() / processes:8.4f}  {kept}")


if __name__ == "__main__":
    main()
