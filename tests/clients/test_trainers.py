"""Training with other people's trainers: 20 steps, saved in the middle, resumed, the same losses.

`make test-clients`, in an environment of its own.
"""

import pytest
import torch

import client_parts as parts
from client_parts import HALF, OPTIONS, STEPS, batch, make_model
from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # their warnings are theirs
]
parts.let_torchvision_import()


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
