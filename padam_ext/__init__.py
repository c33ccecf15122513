"""padam_ext: Padam, the partially adaptive momentum optimizer, fused."""

from importlib.metadata import version

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    # The name lets `python -m padam_ext` print this as one line.
    raise ModuleNotFoundError(
        "padam_ext needs PyTorch 2.9 or later: pip install torch", name=__name__
    ) from None

from padam_ext.backends import available_backends
from padam_ext.optimizer import FusedPadam

__all__ = ["FusedPadam", "__version__", "available_backends"]
__version__ = version("padam_ext")
