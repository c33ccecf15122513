"""Language modelling by words: Penn Treebank, or the documentation that comes with Python."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.paper.models import LSTMS, LanguageModel

END, UNKNOWN = "<eos>", "<unk>"
TIME_STEPS = 35  # of truncated backpropagation: Zaremba et al. 2014; the paper does not say
MAX_GRAD_NORM = 0.25  # Merity et al. 2018; the paper does not say


@dataclass(frozen=True)
class Corpus:
    """Numbers of words, int64 (words,), for training and for tests; how many words there are."""

    train: Tensor
    test: Tensor
    vocabulary: int


def numbered(train: list[str], test: list[str]) -> Corpus:
    """Words as numbers, the most frequent one first; what training has not is UNKNOWN."""
    counts = Counter(train)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    if UNKNOWN not in counts:
        words.append(UNKNOWN)
    numbers = {word: number for number, word in enumerate(words)}
    parts = (
        torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in part])
        for part in (train, test)
    )
    return Corpus(*parts, vocabulary=len(words))


def penn_treebank(folder: Path) -> Corpus:
    """Mikolov's version: ptb.train.txt and ptb.test.txt, a sentence in each line.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no text, or empty.
    """
    parts = []
    for name in ("ptb.train.txt", "ptb.test.txt"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"Penn Treebank: {folder / name} is not there; the files are ptb.train.txt and "
                f"ptb.test.txt of Mikolov's simple-examples.tgz"
            )
        try:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / name} is not text: {error}") from error
        if not lines:
            raise ValueError(f"{folder / name} is empty")
        parts.append([word for line in lines for word in [*line.split(), END]])
    return numbered(*parts)


def python_documentation() -> Corpus:
    """The language reference that pydoc shows, every tenth paragraph for tests.

    A paragraph that stands in several topics counts once. Words of training that occur fewer than
    three times are UNKNOWN, as rare ones are in the Penn Treebank. It differs a little from one
    version of Python to the next.
    """
    from pydoc_data.topics import topics

    train: list[str] = []
    test: list[str] = []
    paragraphs = (
        tuple(re.findall(r"[a-z]+|[.,;:()]", paragraph.lower()))
        for name in sorted(topics)
        for paragraph in topics[name].split("\n\n")
    )
    for number, words in enumerate(dict.fromkeys(paragraphs)):
        if words:
            (test if number % 10 == 9 else train).extend([*words, END])
    counts = Counter(train)
    return numbered([word if counts[word] >= 3 else UNKNOWN for word in train], test)


@dataclass
class TextProblem:
    """A language model and its words, in parallel streams: int64 (time, streams)."""

    model: LanguageModel
    train: Tensor
    test: Tensor
    max_grad_norm: float | None = MAX_GRAD_NORM

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return math.ceil((len(self.train) - 1) / TIME_STEPS)

    @property
    def test_batches(self) -> int:
        """How many batches the tests have."""
        return math.ceil((len(self.test) - 1) / TIME_STEPS)

    def losses(self) -> Iterator[tuple[Tensor, int]]:
        """Of one epoch: the mean loss of each batch, and over how many time steps."""
        self.model.train()
        yield from self._losses(self.train)

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Perplexity on the test words."""
        self.model.eval()
        losses = []
        with torch.no_grad():
            for loss, count in self._losses(self.test):
                losses.append((loss.double() * count, count))
                after_batch()
        mean = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        return {"test_perplexity": float(torch.exp(torch.as_tensor(mean)))}

    def _losses(self, words: Tensor) -> Iterator[tuple[Tensor, int]]:
        state = None
        for start in range(0, len(words) - 1, TIME_STEPS):
            targets = words[start + 1 : start + 1 + TIME_STEPS]
            logits, state = self.model(words[start : start + len(targets)], state)
            state = tuple(part.detach() for part in state)
            yield nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), len(targets)


def make_text_problem(
    corpus: Corpus, model: str, width: int, dropout: float, batch_size: int, device: torch.device
) -> TextProblem:
    """The model of that name for the corpus; tests run in ten streams."""

    def streams(words: Tensor, count: int) -> Tensor:
        length = len(words) // count
        if length < 2:
            raise ValueError(f"{len(words)} words are too few for {count} streams")
        return words[: length * count].view(count, length).t().contiguous().to(device)

    net = LanguageModel(corpus.vocabulary, width, LSTMS[model], dropout).to(device)
    return TextProblem(net, streams(corpus.train, batch_size), streams(corpus.test, 10))
