"""padam_ext: Padam, the partially adaptive momentum optimizer, fused."""

from importlib.metadata import version

from padam_ext.backends import available_backends
from padam_ext.optimizer import FusedPadam

__all__ = ["FusedPadam", "__version__", "available_backends"]
__version__ = version("padam_ext")
