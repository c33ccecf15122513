"""Small models, data and surroundings for the tests of `make test-clients`."""

import contextlib

import torch

VOCABULARY = 50
OPTIONS = {"lr": 0.05, "weight_decay": 1e-3, "partial": 0.25}
STEPS, HALF = 20, 10  # a run, and where it is saved and resumed


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))


def small_batches(count=3):
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(torch.randn(8 * count, 16, generator=generator), 8)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(seed):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


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


def language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def counting_rows():
    """Counting, which can be learnt."""
    rows = [(torch.arange(16) + first) % VOCABULARY for first in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def counting_text():
    """The same as text, for trainers that tokenize."""
    from datasets import Dataset

    rows = [(torch.arange(16) + first) % VOCABULARY for first in range(64)]
    return Dataset.from_dict({"text": [" ".join(map(str, row.tolist())) for row in rows]})


def counting_tokenizer():
    """One token for each number; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", eos_token="0", pad_token="0"
    )


def let_torchvision_import():
    """Declares the operators that torchvision describes when imported.

    Its wheels on PyPI are compiled for CUDA. Beside a torch for the CPU their library does not
    load, and the import fails on operators that nothing here calls. timm imports it, and so do
    others once it is installed.
    """
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)  # what it declared ends with it


_LIBRARIES = []


def as_launched(monkeypatch, rank, processes):
    """Puts into the environment what a launcher does."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(name, str(processes))


@contextlib.contextmanager
def one_process(monkeypatch):
    """A process group of this process alone."""
    as_launched(monkeypatch, 0, 1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def prepare_deepspeed(monkeypatch, rank, processes):
    """For a process group that there is already."""
    from deepspeed import comm, ops
    from deepspeed.utils import groups

    # Collectives in shared memory would be compiled first, for minutes; gloo does without.
    monkeypatch.setitem(ops.__compatible_ops__, "deepspeed_shm_comm", False)
    # What it keeps of a process group ends with that.
    monkeypatch.setattr(comm.comm, "cdb", None)
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)
    as_launched(monkeypatch, rank, processes)


@contextlib.contextmanager
def deepspeed_process(monkeypatch):
    """One process for DeepSpeed."""
    with one_process(monkeypatch):
        prepare_deepspeed(monkeypatch, 0, 1)
        yield
