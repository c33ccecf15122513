"""How each process that torchrun has started finds the others. Both examples begin with it."""

import os

import torch
import torch.distributed as dist


def join_processes() -> torch.device:
    """This process's GPU where there is one for each, else the CPU."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # With device_id, NCCL knows its GPU from the start; gloo needs nothing.
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    return device
