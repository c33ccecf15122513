"""What the paper found: its tables of Chen et al., IJCAI 2020, by data set and model.

Test accuracy in percent after 200 epochs on CIFAR-10 and CIFAR-100 (in the supplement) and after
100 on ImageNet, test perplexity after 200 on the Penn Treebank. In the order of optimizers.NAMES.
"""

from __future__ import annotations

PUBLISHED: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("CIFAR-10", "vgg16", "test_error"): (93.71, 92.21, 92.54, 93.54, 92.94, 93.28, 93.78),
    ("CIFAR-10", "resnet18", "test_error"): (95.00, 92.89, 93.53, 94.56, 93.92, 94.16, 94.94),
    ("CIFAR-10", "wrn-16-4", "test_error"): (95.26, 92.27, 92.91, 95.08, 94.23, 93.85, 95.34),
    ("CIFAR-100", "vgg16", "test_error"): (73.32, 66.60, 69.40, 73.03, 72.35, 72.00, 74.39),
    ("CIFAR-100", "resnet18", "test_error"): (77.77, 71.72, 72.62, 76.69, 74.55, 75.29, 77.85),
    ("CIFAR-100", "wrn-16-4", "test_error"): (76.66, 71.83, 73.02, 76.04, 74.47, 73.49, 76.42),
    ("ImageNet", "resnet18", "test_error"): (70.23, 63.79, 67.69, 67.93, 68.23, 68.13, 70.07),
    ("ImageNet", "resnet18", "test_error_top5"): (89.40, 85.61, 88.15, 88.47, 88.59, 88.55, 89.47),
    ("ImageNet", "vgg16", "test_error"): (73.93, 69.52, 69.61, 69.89, 71.56, 70.00, 74.04),
    ("ImageNet", "vgg16", "test_error_top5"): (91.82, 89.12, 89.19, 89.35, 90.25, 89.27, 91.93),
    ("Penn Treebank", "lstm2", "test_perplexity"): (
        63.37, 61.58, 62.56, 63.93, 64.13, 63.14, 61.53,
    ),
    ("Penn Treebank", "lstm3", "test_perplexity"): (
        61.22, 60.44, 61.92, 63.24, 60.01, 60.89, 58.48,
    ),
}  # fmt: skip
