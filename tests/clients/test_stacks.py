"""docs/stacks.md: each section trains with the library that it is about.

`make test-clients`, in an environment of its own.
"""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import client_parts as parts
from padam_ext import FusedPadam

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # their warnings are theirs
]
PAGE = Path(__file__).parents[2] / "docs" / "stacks.md"
LANGUAGE_MODELS = ("transformers", "TRL", "PEFT")
PROCESSES = {
    "DeepSpeed": parts.deepspeed_process,
    "Gradients that are sharded as plain tensors": parts.one_process,
}
parts.let_torchvision_import()


def sections():
    """The Python code under each heading of the page."""
    for text in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, rest = text.partition("\n")
        code = re.findall(r"^```python\n(.*?)^```", rest, re.DOTALL | re.MULTILINE)
        yield pytest.param(heading, "\n".join(code), id=heading.replace(" ", "-"))


def what_the_page_takes_for_granted(heading):
    given = {"torch": torch, "FusedPadam": FusedPadam, "__name__": "page"}
    if heading not in LANGUAGE_MODELS:
        return given | {"model": parts.small_model(), "loader": parts.small_batches()}
    dataset = parts.counting_text() if heading == "TRL" else parts.counting_rows()
    return given | {
        "model": parts.language_model(),
        "dataset": dataset,
        "tokenizer": parts.counting_tokenizer(),
    }


def train(model, optimizer):
    """Some steps, for sections that end once the optimizer is made."""
    for seed in range(3):
        optimizer.zero_grad()
        if hasattr(model, "generate"):
            row = parts.counting_rows()[seed]
            loss = model(**{name: tensor[None] for name, tensor in row.items()}).loss
        else:
            batch = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()


@pytest.fixture
def stepped():
    """What has made a step."""
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    yield seen
    handle.remove()


@pytest.mark.parametrize(("heading", "code"), list(sections()))
def test_the_section_trains(heading, code, stepped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may write
    namespace = what_the_page_takes_for_granted(heading)
    before = [param.detach().clone() for param in namespace["model"].parameters()]
    with PROCESSES.get(heading, lambda _: contextlib.nullcontext())(monkeypatch):
        exec(compile(code, f"{PAGE.name}: {heading}", "exec"), namespace)
        if not stepped:
            train(namespace["model"], namespace["optimizer"])
    assert FusedPadam in map(type, stepped)
    after = list(namespace["model"].parameters())
    assert all(param.isfinite().all() for param in after)
    assert len(after) != len(before) or not all(map(torch.equal, before, after))
