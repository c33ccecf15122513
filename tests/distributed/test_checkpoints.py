"""Checkpoints of torch.distributed.checkpoint: other optimizers' and other numbers of processes."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from launch import in_processes
from padam_ext import FusedPadam
from padam_ext.distributed.adam_load_planner import AdamLoadPlanner
from scenarios import quietly

pytestmark = pytest.mark.distributed
OPTIONS = {"weight_decay": 0.1, "lr": 0.05}
PACKED = {"state_dtype": "packed32", "master": "split", "partial": 0.3}
SAVED_BY = {
    "packed": lambda params: FusedPadam(params, **OPTIONS, **PACKED),
    "FusedPadam": lambda params: FusedPadam(params, **OPTIONS, partial=0.3),
    "Adam": lambda params: torch.optim.Adam(params, **OPTIONS),
    "Adam with amsgrad": lambda params: torch.optim.Adam(params, **OPTIONS, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, **OPTIONS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of each, saved by two processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    in_processes(2, save, str(folder))
    return str(folder)


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_resharded(processes, folder):
    in_processes(processes, load, folder, processes)


def make(processes, name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    if name == "packed":
        model.bfloat16()
    return fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))


def train(model, optimizer):
    optimizer.zero_grad()
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    inputs = inputs.to(next(model.parameters()).dtype)
    model(inputs).square().mean().backward()
    optimizer.step()


def whole(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    # Neither gloo nor NCCL take int16.
    wide = tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor
    return wide.full_tensor().to(tensor.dtype)


def everything(model, optimizer):
    """Parameters and states by name, whole."""
    names = {param: name for name, param in model.named_parameters()}
    tensors = {name: whole(param.detach()) for param, name in names.items()}
    for param, name in names.items():
        for key, value in optimizer.state[param].items():
            tensors[f"{name}.{key}"] = whole(value)
    return copy.deepcopy(tensors)


def flat(is_flat):
    return StateDictOptions(flatten_optimizer_state_dict=is_flat)


def save(rank, folder):
    with quietly():
        for name, make_optimizer in SAVED_BY.items():
            model = make(2, name)
            optimizer = make_optimizer(model.parameters())
            for _ in range(3):
                train(model, optimizer)
            torch.save(everything(model, optimizer), f"{folder}/{name}, rank {rank}.pt")
            for is_flat in (False, True):
                state = get_state_dict(model, optimizer, options=flat(is_flat))
                state = {"model": state[0], "optimizer": state[1]}
                dcp.save(state, checkpoint_id=f"{folder}/{name}, {is_flat}")


def load(rank, folder, processes):
    with quietly():
        for name in SAVED_BY:
            for is_flat in (False, True):
                load_one(folder, name, is_flat, processes)


def load_one(folder, name, is_flat, processes):
    model = make(processes, name)
    options = PACKED if name == "packed" else {"partial": 0.3}
    optimizer = FusedPadam(model.parameters(), lr=9.0, **options)
    model_state, state = get_state_dict(model, optimizer, options=flat(is_flat))
    checkpoint = f"{folder}/{name}, {is_flat}"
    into = {"model": model_state, "optimizer": state}
    planner = None if name in ("FusedPadam", "packed") else AdamLoadPlanner()
    dcp.load(into, checkpoint_id=checkpoint, planner=planner)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=into["model"],
        optim_state_dict=into["optimizer"],
        options=flat(is_flat),
    )
    saved = torch.load(f"{folder}/{name}, rank 0.pt")
    loaded = everything(model, optimizer)
    for key, value in loaded.items():
        expected = saved.get(key, saved[key.replace("max_exp", "exp")])
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), key
    if name == "packed":
        assert {"0.weight.packed_mvh", "0.weight.param_low", "0.weight.salt"} <= loaded.keys()
        assert loaded["1.weight.param_low"].count_nonzero() > 3
    [group] = optimizer.param_groups
    options = {key: group.get(key) for key in ("lr", "weight_decay", "partial")}
    assert options == {"lr": 0.05, "weight_decay": 0.1, "partial": 0.3}, (name, is_flat, options)
    assert group["decoupled_weight_decay"] == (name == "AdamW")
    assert group["amsgrad"] == (name in ("FusedPadam", "packed", "Adam with amsgrad"))
    train(model, optimizer)
    assert optimizer.state[next(model.parameters())]["step"] == 4


def test_what_else_is_missing_is_an_error(tmp_path):
    in_processes(1, load_what_is_not_there, str(tmp_path))


def load_what_is_not_there(rank, folder):
    with quietly():
        dcp.save({"state": {"w": {"exp_avg": torch.ones(2)}}}, checkpoint_id=folder)
        for state in (
            {"state": {"w": {"exp_avg": torch.zeros(2), "max_exp_avg_sq": torch.zeros(2)}}},
            {"partial": 0.3},
            {"param_groups": [{"new": 0.3}]},
        ):
            with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
                dcp.load(state, checkpoint_id=folder, planner=AdamLoadPlanner())
        state = {"param_groups": [{"second_moment": "sum"}]}
        with pytest.raises(dcp.api.CheckpointException, match=r"'sum', but .* are means"):
            dcp.load(state, checkpoint_id=folder, planner=AdamLoadPlanner())
        state = {"state": {"w": {"packed_mvh": torch.zeros(2, dtype=torch.int32)}}}
        with pytest.raises(
            dcp.api.CheckpointException, match=r"state\.w\.packed_mvh\. It has 'exp_avg'"
        ):
            dcp.load(state, checkpoint_id=folder, planner=AdamLoadPlanner())
