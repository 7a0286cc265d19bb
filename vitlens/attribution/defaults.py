"""Settings of the attributions where nothing else is asked for, and what a plan of the passes counts with."""

from typing import Final

SAMPLES: Final = 25  # noisy copies of SmoothGrad
NOISE: Final = 0.15  # its standard deviation, as a share of each image's range of values
STEPS: Final = 50  # of integrated gradients
BASELINE: Final = 0.0  # value of the pixels of its baseline image: black
MASKS: Final = 512  # of RISE
COALITIONS: Final = 512  # of KernelSHAP, at least; four a patch where there are many patches
PATCHES: Final = 196  # that a method covers one by one, about: 14 x 14 of a ViT
CHANNELS: Final = 192  # of the layer that ScoreCAM and AblationCAM go through, at least
