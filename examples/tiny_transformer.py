"""A small transformer that learns to write like Python's documentation. Both examples train it."""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

TEXT = torch.tensor(list("\n".join(map(topics.get, sorted(topics))).encode()))  # half a megabyte
LENGTH = 64


class TinyTransformer(nn.Module):
    """Predicts each byte of a text from those before it. Returns the mean loss, in nats."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        tokens = text[:, :-1]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.position(places)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def batch(step: int, rank: int, size: int = 16) -> Tensor:
    """Pieces of the text. Each step and each process has its own, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(TEXT) - LENGTH, (size, 1), generator=generator)
    return TEXT[starts + torch.arange(LENGTH + 1)]
