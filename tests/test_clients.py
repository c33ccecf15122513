"""Training with other people's trainers: 20 steps, saved in the middle, resumed, the same losses.

`make test-clients`, in an environment of its own.
"""

import pytest
import torch

from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # their warnings are theirs
]
OPTIONS = {"lr": 0.05, "weight_decay": 1e-3, "partial": 0.25}
STEPS, HALF = 20, 10


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


@pytest.mark.parametrize("bf16", [False, True])
def test_transformers(bf16, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    rows = [(torch.arange(16) + first) % 50 for first in range(64)]  # counting, which can be learnt
    dataset = [{"input_ids": row, "labels": row} for row in rows]

    def trained(resume):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config)
        optimizer = FusedPadam(model.parameters(), **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, save_steps=HALF, logging_steps=1,
            per_device_train_batch_size=4, use_cpu=True, bf16=bf16, max_grad_norm=1.0, seed=0,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=dataset, optimizers=(optimizer, scheduler)
        )
        trainer.train(resume_from_checkpoint=resume)
        history = trainer.state.log_history
        return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}

    expected = trained(None)
    assert len(expected) == STEPS
    assert expected[STEPS] < expected[1]
    assert trained(str(tmp_path / f"checkpoint-{HALF}")) == expected


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
