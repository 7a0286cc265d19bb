"""Defaults of the attention methods, shared by the public functions and the command line; free of torch."""

from typing import Final

ALPHA: Final = 0.5  # share of the identity in rollout's (1 - alpha) A + alpha I

WHOLE: Final = 4  # images of which a viewer gets every head; of further ones the mean over the heads of each layer

REFINE_STEPS: Final = 2  # of a map's refinement by attention between patches; even, see affinity.py
