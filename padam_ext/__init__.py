"""padam_ext: Padam, the partially adaptive momentum optimizer, fused."""

from importlib.metadata import version

try:
    from padam_ext import custom_op as _custom_op  # noqa: F401 - it defines torch.ops.padam_ext
    from padam_ext.backward import step_during_backward
    from padam_ext.choice import available_backends
    from padam_ext.iterate_sampler import IterateSampler
    from padam_ext.optimizer import FusedPadam
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    # The name lets `python -m padam_ext` print this as one line.
    raise ModuleNotFoundError(
        "padam_ext needs PyTorch 2.9 or later: pip install torch", name=__name__
    ) from None

__all__ = [
    "FusedPadam",
    "IterateSampler",
    "__version__",
    "available_backends",
    "step_during_backward",
]
__version__ = version("padam_ext")
