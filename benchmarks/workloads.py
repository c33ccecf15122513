"""Lists of parameters to step: the true shapes of models, and lists that are hard on an optimizer.

On a device on which a list would take too long or too much memory it is scaled down, by one rule:
every tensor's first dimension is divided by one whole number, the smallest that brings the list
down to the elements allowed, and rounded up. The number of tensors stays, which is what host time
depends on, and so do the proportions of their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

Shape = tuple[int, ...]


def _conv(inputs: int, outputs: int, size: int) -> Shape:
    return (outputs, inputs, size, size)


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def _linear(inputs: int, outputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def resnet(blocks: list[int], *, bottleneck: bool, classes: int = 1000) -> list[Shape]:
    """He et al. 2016, as in torchvision: `blocks` in each of four stages."""
    shapes = [_conv(3, 64, 7), *_norm(64)]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        outputs = 4 * width if bottleneck else width
        for block in range(count):
            if bottleneck:
                convs = [(inputs, width, 1), (width, width, 3), (width, outputs, 1)]
            else:
                convs = [(inputs, width, 3), (width, outputs, 3)]
            if block == 0 and inputs != outputs:
                convs.append((inputs, outputs, 1))  # the shortcut
            for conv in convs:
                shapes += [_conv(*conv), *_norm(conv[1])]
            inputs = outputs
    return shapes + _linear(inputs, classes)


def vgg16(classes: int = 1000) -> list[Shape]:
    """Simonyan and Zisserman 2015, as in torchvision, without batch normalization."""
    shapes: list[Shape] = []
    inputs = 3
    for width in [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6:
        shapes += [_conv(inputs, width, 3), (width,)]
        inputs = width
    return shapes + _linear(512 * 7 * 7, 4096) + _linear(4096, 4096) + _linear(4096, classes)


def wide_resnet(depth: int, factor: int, classes: int = 10) -> list[Shape]:
    """WRN-depth-factor for CIFAR: Zagoruyko and Komodakis 2016."""
    shapes = [_conv(3, 16, 3)]
    inputs = 16
    for stage in range(3):
        outputs = 16 * factor * 2**stage
        for block in range((depth - 4) // 6):
            shapes += [*_norm(inputs), _conv(inputs, outputs, 3)]
            shapes += [*_norm(outputs), _conv(outputs, outputs, 3)]
            if block == 0:
                shapes.append(_conv(inputs, outputs, 1))
            inputs = outputs
    return [*shapes, *_norm(inputs), *_linear(inputs, classes)]


def lstm(layers: int, width: int, words: int) -> list[Shape]:
    """A language model on words: embedding, LSTM layers of one width, decoder."""
    shapes: list[Shape] = [(words, width)]
    for _ in range(layers):
        shapes += [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
    return shapes + _linear(width, words)


def gpt2(layers: int, width: int, words: int = 50257, positions: int = 1024) -> list[Shape]:
    """Radford et al. 2019: the decoder shares the embedding."""
    shapes: list[Shape] = [(words, width), (positions, width)]
    for _ in range(layers):
        shapes += [*_norm(width), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [*_norm(width), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return shapes + _norm(width)


LLAMA_WIDTH = 4096


def llama3_8b_layer() -> list[Shape]:
    """Grattafiori et al. 2024: 32 query heads, 8 key and value heads of 128."""
    width, inner, keys = LLAMA_WIDTH, 14336, 1024
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    return [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]


def llama3_8b() -> list[Shape]:
    """All of it: 32 layers, the embedding and a decoder of its own."""
    words = 128256
    layers = 32 * llama3_8b_layer()
    return [(words, LLAMA_WIDTH), *layers, (LLAMA_WIDTH,), (words, LLAMA_WIDTH)]


WORKLOADS: dict[str, Callable[[], list[Shape]]] = {
    "1 x 100M": lambda: [(100_000_000,)],
    "1 x 16M": lambda: [(16_000_000,)],
    "1000 x 1024": lambda: [(1024,)] * 1000,
    "10000 x 10": lambda: [(10,)] * 10_000,
    "ResNet-18": lambda: resnet([2, 2, 2, 2], bottleneck=False),
    "ResNet-50": lambda: resnet([3, 4, 6, 3], bottleneck=True),
    "VGG-16": vgg16,
    "WRN-16-4": lambda: wide_resnet(16, 4),
    "LSTM, 2 layers": lambda: lstm(2, 650, 10_000),
    "GPT-2 124M": lambda: gpt2(12, 768),
    "GPT-2 1.5B": lambda: gpt2(48, 1600),
    "Llama-3-8B layer": llama3_8b_layer,
    "Llama-3-8B": llama3_8b,
}


def elements(shapes: list[Shape]) -> int:
    """Elements of all tensors together."""
    return sum(map(math.prod, shapes))


def scaled(shapes: list[Shape], target: int) -> tuple[list[Shape], int]:
    """A list of at most about `target` elements, and what its first dimensions were divided by.

    Rounding up may leave it a little larger, where many tensors have a small first dimension.
    """
    divisor = -(-elements(shapes) // target)
    return [(-(-first // divisor), *rest) for first, *rest in shapes], divisor


@cache
def workload(name: str, most: int, target: int) -> tuple[list[Shape], int]:
    """A workload, scaled down to `target` if it has more than `most` elements, and the divisor."""
    shapes = WORKLOADS[name]()
    return scaled(shapes, target) if elements(shapes) > most else (shapes, 1)
