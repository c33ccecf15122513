"""The paper's models: CNNs in the form they have for CIFAR, and LSTM language models.

`width` is the number of channels in a CNN's first stage, 64 in the paper's, and the size of an
LSTM's layers; a smaller one makes the same model for smaller data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def vgg16(channels: int, classes: int, width: int) -> nn.Module:
    """Simonyan and Zisserman 2015, with batch normalization, for CIFAR.

    Before the classifier come two fully connected layers of 8 * width, 512 in the paper.
    """
    layers: list[nn.Module] = []
    inputs = channels
    for factor, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(count):
            layers += [_conv_norm(inputs, factor * width, 3), nn.ReLU()]
            inputs = factor * width
        # The same on 32 x 32 pixels; of smaller images one pixel is left.
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    head: list[nn.Module] = [nn.Flatten()]
    for _ in range(2):
        head += [nn.Linear(inputs, inputs), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(inputs, classes))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut: He et al. 2016."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv_norm(inputs, outputs, 3, stride), nn.ReLU(), _conv_norm(outputs, outputs, 3)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class PreactivatedBlock(nn.Module):
    """Normalization before each convolution: Zagoruyko and Komodakis 2016."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        active = self.activation(x)
        return self.residual(active) + (self.shortcut(active) if self.shortcut else x)


def _head(inputs: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]


def resnet18(channels: int, classes: int, width: int) -> nn.Module:
    """ResNet-18 that starts with a 3 x 3 convolution and no pooling, for CIFAR."""
    layers: list[nn.Module] = [_conv_norm(channels, width, 3), nn.ReLU()]
    inputs = width
    for factor in (1, 2, 4, 8):
        outputs = factor * width
        layers.append(BasicBlock(inputs, outputs, 1 if factor == 1 else 2))
        layers.append(BasicBlock(outputs, outputs, 1))
        inputs = outputs
    return nn.Sequential(*layers, *_head(inputs, classes))


def wrn_16_4(channels: int, classes: int, width: int) -> nn.Module:
    """WRN-16-4: three stages of two blocks, four times as wide as the first convolution.

    Raises:
        ValueError: the width is not a multiple of four.
    """
    if width % 4:
        raise ValueError(f"the width of wrn-16-4 must be a multiple of 4, got {width}")
    layers: list[nn.Module] = [nn.Conv2d(channels, width // 4, 3, padding=1, bias=False)]
    inputs = width // 4
    for factor in (1, 2, 4):
        outputs = factor * width
        layers.append(PreactivatedBlock(inputs, outputs, 1 if factor == 1 else 2))
        layers.append(PreactivatedBlock(outputs, outputs, 1))
        inputs = outputs
    return nn.Sequential(*layers, nn.BatchNorm2d(inputs), nn.ReLU(), *_head(inputs, classes))


CNNS = {"vgg16": vgg16, "resnet18": resnet18, "wrn-16-4": wrn_16_4}


class LanguageModel(nn.Module):
    """Embedding, LSTM layers of one width, decoder, dropout between all: Zaremba et al. 2014.

    The paper says no more than "2-layer and 3-layer LSTM". At width 650 and dropout 0.5 this has
    the shape of Zaremba et al.'s medium model; the paper's perplexities need more regularization.
    """

    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, words)

    def forward(
        self, words: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Words (time, batch) and the state before them; logits (time, batch, words), state."""
        hidden, state = self.lstm(self.dropout(self.embedding(words)), state)
        return self.decoder(self.dropout(hidden)), state


LSTMS = {"lstm2": 2, "lstm3": 3}
