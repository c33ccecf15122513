"""Training with libraries that make, wrap, shard or save the optimizer or its parameters.

`make test-clients`, in an environment of its own.
"""

from dataclasses import dataclass

import pytest
import torch

import client_parts as parts
from client_parts import HALF, OPTIONS, STEPS, train_plainly
from launch import in_processes
from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # their warnings are theirs
]
parts.let_torchvision_import()


def padam_of_timm(model, name="padam", **options):
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    info = OptimInfo(name="padam", opt_class=FusedPadam, has_betas=True, defaults={"partial": 0.25})
    default_registry.register(info)
    return create_optimizer_v2(model, name, lr=0.05, weight_decay=1e-3, **options)


def test_timm():
    """Its groups leave biases without decay; defaults of the registry and of the call arrive."""
    model, by_hand = parts.small_model(), parts.small_model()
    optimizer = padam_of_timm(model, betas=(0.8, 0.99))
    decays = {
        p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decays == {1: 0, 2: 1e-3}
    groups = [
        {"params": [p for p in by_hand.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in decays.items()
    ]
    expected = FusedPadam(groups, lr=0.05, partial=0.25, betas=(0.8, 0.99))
    losses = train_plainly(model, optimizer, range(STEPS))
    assert losses == train_plainly(by_hand, expected, range(STEPS))


def test_timm_layer_decay():
    """With Lookahead and a scheduler of timm's, which reads the groups' `lr_scale`."""
    import timm
    from timm.scheduler import CosineLRScheduler

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2,
        num_classes=4,
    )  # fmt: skip
    optimizer = padam_of_timm(model, "lookahead_padam", layer_decay=0.5)
    scheduler = CosineLRScheduler(optimizer, STEPS, warmup_t=2, warmup_lr_init=1e-3)
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
    losses = []
    for step in range(STEPS):
        scheduler.step(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    scales = {group["lr_scale"]: group["lr"] for group in optimizer.param_groups}
    assert scales == {scale: scales[1.0] * scale for scale in (1.0, 0.5, 0.25, 0.125)}


def optimizers_of_torchtitan(model):
    """Its container, with the optimizer added to the names that it knows."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Optimizers(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            pass

        @staticmethod
        def _resolve_optimizer_factory(name):
            return FusedPadam

    groups = [
        ParamGroupConfig(
            pattern=pattern, optimizer_name="FusedPadam", optimizer_kwargs=OPTIONS | changes
        )
        for pattern, changes in ((r"bias$", {"weight_decay": 0.0}), (".*", {}))
    ]
    return Optimizers.Config(param_groups=groups).build(model_parts=[model])


def test_torchtitan(tmp_path):
    """Its flat checkpoints, by torch.distributed.checkpoint."""
    from torch.distributed import checkpoint

    model = parts.small_model()
    optimizers = optimizers_of_torchtitan(model)
    train_plainly(model, optimizers, range(HALF))
    saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    checkpoint.save(saved, checkpoint_id=str(tmp_path), no_dist=True)

    second = parts.small_model()
    resumed = optimizers_of_torchtitan(second)
    loaded = {"model": second.state_dict(), "optimizer": resumed.state_dict()}
    checkpoint.load(loaded, checkpoint_id=str(tmp_path), no_dist=True)
    second.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    rest = range(HALF, STEPS)
    assert train_plainly(second, resumed, rest) == train_plainly(model, optimizers, rest)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed(stage, tmp_path, monkeypatch):
    """One process: the same losses as without, and a checkpoint that goes on with the same."""
    with parts.deepspeed_process(monkeypatch):
        import deepspeed

        def engine():
            model = parts.small_model()
            optimizer = FusedPadam(model.parameters(), **OPTIONS)
            config = {
                "train_micro_batch_size_per_gpu": 16,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
            return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

        def trained(engine, seeds):
            losses = []
            for seed in seeds:
                inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
                loss = engine(inputs).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            return losses

        first = engine()
        losses = trained(first, range(HALF))
        first.save_checkpoint(str(tmp_path))
        rest = trained(first, range(HALF, STEPS))
        second = engine()
        second.load_checkpoint(str(tmp_path))
        assert trained(second, range(HALF, STEPS)) == rest

    model = parts.small_model()
    expected = train_plainly(model, FusedPadam(model.parameters(), **OPTIONS), range(STEPS))
    assert losses + rest == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_over_two_processes(stage):
    in_processes(2, step_with_zero, stage)


def step_with_zero(rank, stage):
    """Each has half of the gradients. A norm of its own is an error, that of all is right."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        parts.prepare_deepspeed(monkeypatch, rank, 2)
        import deepspeed

        model = parts.small_model()
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = FusedPadam(model.parameters(), **OPTIONS, max_grad_norm=0.1)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        for group in (None, torch.distributed.group.WORLD):
            optimizer.norm_group = group
            engine.backward(engine(inputs).square().mean())
            if group is None:
                with pytest.raises(RuntimeError, match=r"DeepSpeedZeroOptimizer.* norm_group"):
                    engine.step()
        engine.step()

    whole = parts.small_model()
    expected = FusedPadam(whole.parameters(), **OPTIONS, max_grad_norm=0.1)
    whole(inputs).square().mean().backward()
    expected.step()
    torch.testing.assert_close(optimizer.grad_norm, expected.grad_norm)


def float8_model(**options):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, **options)
    return convert_to_float8_training(parts.small_model(), config=config)


def test_torchao():
    model = float8_model()
    optimizer = FusedPadam(model.parameters(), **OPTIONS)
    losses = train_plainly(model, optimizer, [0] * STEPS)
    assert losses[-1] < losses[0]


def test_torchao_weights_that_are_wrapped():
    """As FSDP2 gathers them in float8: the tensor inside is stepped as any other."""
    models = [float8_model(enable_fsdp_float8_all_gather=wrapped) for wrapped in (True, False)]
    assert type(models[0][0].weight).__name__ == "WeightWithDynamicFloat8CastTensor"
    for model in models:
        optimizer = FusedPadam(model.parameters(), **OPTIONS)
        losses = train_plainly(model, optimizer, range(5))
        assert losses[-1] != losses[0]
    inside = models[0][0].weight._tensor
    assert torch.equal(inside, models[1][0].weight)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"state_dtype": "packed32"}),
        (torch.bfloat16, {"state_dtype": "packed32", "param_rounding": "stochastic"}),
        (torch.bfloat16, {"state_dtype": "packed32", "master": "split"}),
    ],
)
def test_safetensors(dtype, storage, tmp_path):
    """States through its files: a bitwise equal continuation, also in channels_last."""
    from safetensors.torch import load_file, save_file

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh())
        model.to(dtype, memory_format=torch.channels_last)
        return model, FusedPadam(model.parameters(), **OPTIONS, **storage)

    def trained(model, optimizer, seeds):
        for seed in seeds:
            optimizer.zero_grad()
            images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            model(images.to(dtype)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    def save(tensors, name):
        save_file({key: t.contiguous() for key, t in tensors.items()}, tmp_path / name)

    model, optimizer = made()
    trained(model, optimizer, range(HALF))
    saved = optimizer.state_dict()
    states, tensors = {}, {}
    for i, state in saved["state"].items():
        tensors |= {f"{i} {k}": t for k, t in state.items() if torch.is_tensor(t)}
        states[i] = {k: number for k, number in state.items() if not torch.is_tensor(number)}
    save(tensors, "states")
    save(model.state_dict(), "model")

    second, resumed = made()
    second.load_state_dict(load_file(tmp_path / "model"))
    for key, tensor in load_file(tmp_path / "states").items():
        index, name = key.split()
        states[int(index)][name] = tensor
    resumed.load_state_dict({"state": states, "param_groups": saved["param_groups"]})
    rest = range(HALF, STEPS)
    expected = trained(model, optimizer, rest)
    assert all(map(torch.equal, trained(second, resumed, rest), expected))
