"""Training with other libraries: 20 steps, saved in the middle, resumed, the same losses.

`make test-clients`, in an environment of its own.
"""

from dataclasses import dataclass

import pytest
import torch

import client_parts as parts
from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # their warnings are theirs
]
OPTIONS = {"lr": 0.05, "weight_decay": 1e-3, "partial": 0.25}
STEPS, HALF = 20, 10
parts.let_torchvision_import()


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(seed):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


class Trained:
    """Accelerate's loop: prepared model, optimizer and scheduler, clipping by the accelerator."""

    def __init__(self, precision):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # one precision to a process
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = make_model()
        optimizer = FusedPadam(model.parameters(), **OPTIONS)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )

    def run(self, steps):
        losses = []
        for seed in steps:
            with self.accelerator.accumulate(self.model), self.accelerator.autocast():
                loss = self.model(batch(seed)).float().square().mean()
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, tmp_path):
    expected = Trained(precision).run(range(STEPS))
    assert expected[-1] < expected[0]
    first = Trained(precision)
    losses = first.run(range(HALF))
    first.accelerator.save_state(str(tmp_path))
    second = Trained(precision)
    second.run([99])  # whatever it has done is replaced
    second.accelerator.load_state(str(tmp_path))
    assert losses + second.run(range(HALF, STEPS)) == expected


def losses_of(trainer, resume):
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def check_resuming(trained, tmp_path):
    """Given the checkpoint to start at, `trained` returns losses by step, the same ones always."""
    expected = trained(None)
    assert len(expected) == STEPS
    assert expected[STEPS] < expected[1]
    assert trained(str(tmp_path / f"checkpoint-{HALF}")) == expected


def trainer_arguments(tmp_path, bf16):
    return {
        "output_dir": str(tmp_path), "max_steps": STEPS, "save_steps": HALF, "logging_steps": 1,
        "per_device_train_batch_size": 4, "use_cpu": True, "bf16": bf16, "max_grad_norm": 1.0,
        "seed": 0, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip


@pytest.mark.parametrize("bf16", [False, True])
def test_transformers(bf16, tmp_path):
    from transformers import Trainer, TrainingArguments

    def trained(resume):
        model = parts.language_model()
        optimizer = FusedPadam(model.parameters(), **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        arguments = TrainingArguments(**trainer_arguments(tmp_path, bf16))
        dataset = parts.counting_rows()
        trainer = Trainer(
            model, arguments, train_dataset=dataset, optimizers=(optimizer, scheduler)
        )
        return losses_of(trainer, resume)

    check_resuming(trained, tmp_path)


def test_transformers_makes_the_optimizer(tmp_path):
    """Its param groups: no weight decay on biases and norms."""
    from transformers import Trainer, TrainingArguments

    def trained(resume):
        arguments = TrainingArguments(**trainer_arguments(tmp_path, False), weight_decay=1e-3)
        options = {name: value for name, value in OPTIONS.items() if name != "weight_decay"}
        trainer = Trainer(
            parts.language_model(), arguments, train_dataset=parts.counting_rows(),
            optimizer_cls_and_kwargs=(FusedPadam, options),
        )  # fmt: skip
        losses = losses_of(trainer, resume)
        groups = trainer.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [1e-3, 0]
        assert [group["partial"] for group in groups] == [OPTIONS["partial"]] * 2
        return losses

    check_resuming(trained, tmp_path)


@pytest.mark.parametrize("lora", [False, True])
def test_trl(lora, tmp_path):
    """SFTTrainer, which adds the adapters itself where it is given a PEFT configuration."""
    from trl import SFTConfig, SFTTrainer

    def trained(resume):
        trainer = SFTTrainer(
            parts.language_model(),
            SFTConfig(**trainer_arguments(tmp_path, False)),
            train_dataset=parts.counting_text(),
            processing_class=parts.counting_tokenizer(),
            peft_config=adapters() if lora else None,
            optimizer_cls_and_kwargs=(FusedPadam, OPTIONS),
        )
        return losses_of(trainer, resume)

    check_resuming(trained, tmp_path)


def adapters():
    from peft import LoraConfig

    # The head learns as a whole: adapters alone can do little for a model that knows nothing.
    return LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"]
    )


def test_peft():
    """Frozen parameters in the list: neither state nor step; the file holds the others only."""
    from peft import get_peft_model

    def made():
        model = get_peft_model(parts.language_model(), adapters())
        model.eval()  # no dropout
        return model, FusedPadam(model.parameters(), **OPTIONS)

    def trained(model, optimizer, rows):
        losses = []
        for row in rows:
            optimizer.zero_grad()
            loss = model(**{name: tensor[None] for name, tensor in row.items()}).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    rows = [parts.counting_rows()[0]] * STEPS
    model, optimizer = made()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    learning = [p for p in model.parameters() if p.requires_grad]
    first = trained(model, optimizer, rows[:HALF])
    assert set(optimizer.state) == set(learning)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)

    second, resumed = made()
    second.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    rest = trained(model, optimizer, rows[HALF:])
    assert trained(second, resumed, rows[HALF:]) == rest
    assert rest[-1] < first[0]


def test_lightning(tmp_path):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()
            self.losses = {}

        def training_step(self, inputs, index):
            loss = self.model(inputs).square().mean()
            self.losses[self.global_step] = loss.item()
            return loss

        def configure_optimizers(self):
            optimizer = FusedPadam(self.model.parameters(), **OPTIONS)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def trained(steps, resume=None):
        module = Module()
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", gradient_clip_val=0.1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        # One batch to an epoch, so that a resumed run finds the batch that is its turn.
        loader = torch.utils.data.DataLoader(batch(0), batch_size=6)
        trainer.fit(module, loader, ckpt_path=resume)
        return module, trainer

    expected = trained(STEPS)[0].losses
    assert expected[STEPS - 1] < expected[0]
    first, trainer = trained(HALF)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second, _ = trained(STEPS, str(tmp_path / "half.ckpt"))
    assert first.losses | second.losses == expected
    assert set(second.losses) == set(range(HALF, STEPS))


def train_plainly(model, optimizer, seeds):
    """A loop without any library; the losses."""
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors(dtype, tmp_path):
    """States through its files: a bitwise equal continuation, also in channels_last."""
    from safetensors.torch import load_file, save_file

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh())
        model.to(dtype, memory_format=torch.channels_last)
        return model, FusedPadam(model.parameters(), **OPTIONS)

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
    save({f"{i} {k}": t for i, state in saved["state"].items() for k, t in state.items()}, "states")
    save(model.state_dict(), "model")

    second, resumed = made()
    second.load_state_dict(load_file(tmp_path / "model"))
    states = {i: {} for i in saved["state"]}
    for key, tensor in load_file(tmp_path / "states").items():
        index, name = key.split()
        states[int(index)][name] = tensor
    resumed.load_state_dict({"state": states, "param_groups": saved["param_groups"]})
    rest = range(HALF, STEPS)
    expected = trained(model, optimizer, rest)
    assert all(map(torch.equal, trained(second, resumed, rest), expected))


@pytest.mark.parametrize("unscale_grads", [True, False])
def test_accelerate_says_which_steps_were_skipped(unscale_grads):
    """Accelerate has fp16 on GPUs only; on the CPU its optimizer takes a scaler all the same.

    It sees a skipped step by whether GradScaler calls `step`.
    """
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    inner = FusedPadam(model.parameters(), **OPTIONS, unscale_grads=unscale_grads)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    scheduler = AcceleratedScheduler(schedule, optimizer)
    skipped = []
    for factor in (1, float("inf"), 1):
        before = [param.detach().clone() for param in model.parameters()]
        scaler.scale(model(batch(0)).square().mean() * factor).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        unchanged = all(map(torch.equal, before, model.parameters()))
        assert unchanged == (factor != 1)
    assert skipped == [False, not unscale_grads, False]
    counted = 3 if unscale_grads else 2
    assert inner.param_groups[0]["lr"] == OPTIONS["lr"] * 0.5**counted


def test_lightning_clips_in_16_bit():
    """`gradient_clip_val` in 16-mixed. The plugin is given: Lightning makes it on GPUs only."""
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()
            self.norms = []

        def training_step(self, inputs, index):
            return self.model(inputs).square().mean() * 100

        def on_before_optimizer_step(self, optimizer):
            grads = [param.grad for param in self.parameters()]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())

        def configure_optimizers(self):
            return FusedPadam(
                self.parameters(), **OPTIONS, max_grad_norm=float("inf"), unscale_grads=False
            )

    module = Module()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", gradient_clip_val=0.1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batch(0), batch_size=2))
    assert min(module.norms) > 0.1  # unscaled, not yet clipped
    [optimizer] = trainer.optimizers
    assert optimizer.grad_norm.item() == pytest.approx(0.1, rel=1e-3)
