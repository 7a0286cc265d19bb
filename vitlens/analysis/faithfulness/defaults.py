"""Defaults that functions here share with the command line; free of torch."""

from typing import Final

from vitlens.names import Substrate

SUBSTRATE: Final[Substrate] = "blur"  # what replaces a removed patch
OTHER_SUBSTRATES: Final[tuple[Substrate, ...]] = ("mean", "absent")  # with which rankings are compared
OTHER_IMAGES: Final = 128  # on which they are, at most
OTHER_STEPS: Final = 10  # of their removal curves
