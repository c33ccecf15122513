"""Trains a small transformer with FSDP2: parameters, gradients and states are sharded.

    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoint out/fsdp2

Each process keeps and steps its own shards. Gradients are clipped by the norm of all of them. With
--checkpoint the state is saved at the end (on a CPU that needs numpy). Run it again with a larger
--steps, with any number of processes, and it goes on from there. Where there is a GPU for each
process it uses that, otherwise the CPU.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import join_processes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from padam_ext import FusedPadam
from tiny_transformer import TinyTransformer, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="until this step (default: 60)")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from and save into")
    options = parser.parse_args()

    device = join_processes()
    try:
        train(options.steps, options.checkpoint, device)
    finally:
        dist.destroy_process_group()


def train(steps: int, checkpoint: Path | None, device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same parameters in each process
    model = TinyTransformer().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:  # gathered and freed one layer at a time
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # After fully_shard: the optimizer is to step the shards.
    optimizer = FusedPadam(model.parameters(), lr=0.1, max_grad_norm=1.0)

    first = load(model, optimizer, checkpoint) if checkpoint else 0

    if rank == 0:
        print(f"{dist.get_world_size()} processes on {device.type}, from step {first}")
        print(f"{'step':>5} {'loss':>8} {'norm':>8}")
    for step in range(first, steps):
        optimizer.zero_grad()
        loss = model(batch(step, rank).to(device))
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            total = loss.detach()
            dist.all_reduce(total)
            if rank == 0:
                mean = total.item() / dist.get_world_size()
                print(f"{step:5} {mean:8.4f} {optimizer.grad_norm.item():8.4f}")

    if checkpoint and first < steps:
        save(model, optimizer, steps, checkpoint)


def save(model: torch.nn.Module, optimizer: FusedPadam, step: int, folder: Path) -> None:
    """Each process writes its shards."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=folder / f"{step:06}")


def load(model: torch.nn.Module, optimizer: FusedPadam, folder: Path) -> int:
    """Each process reads its shards of what was saved last. Returns the step to go on with."""
    # This file is written when everything else is there.
    saved = sorted(file.parent for file in folder.glob("*/.metadata"))
    if not saved:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=saved[-1])  # into the tensors that are there
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(saved[-1].name)


if __name__ == "__main__":
    main()
