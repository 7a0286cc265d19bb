"""Temporary access to modules, as the lens and what is above it use it."""

from vitlens.models.hooks import Arguments as Arguments
from vitlens.models.hooks import Forward as Forward
from vitlens.models.hooks import Key as Key
from vitlens.models.hooks import Replaced as Replaced
from vitlens.models.hooks import ScopedMode as ScopedMode
from vitlens.models.hooks import arguments as arguments
from vitlens.models.hooks import as_call as as_call
from vitlens.models.hooks import first_tensor as first_tensor
from vitlens.models.hooks import overridden as overridden
from vitlens.models.hooks import watching as watching
