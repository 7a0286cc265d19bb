"""The public names of vitlens and their modules."""

from vitlens.training.loop import fit as _fit
from vitlens.version import __version__ as __version__

train = _fit
