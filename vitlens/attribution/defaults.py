"""Default settings of the attributions, and the sizes from which their numbers of passes are estimated."""

from typing import Final

SAMPLES: Final = 25  # noisy copies of SmoothGrad
NOISE: Final = 0.15  # its standard deviation, as a share of each image's range of values
STEPS: Final = 50  # of integrated gradients
BASELINE: Final = 0.0  # value of the pixels of its baseline image: black
MASKS: Final = 512  # of RISE
COALITIONS: Final = 512  # of KernelSHAP; four per patch where that is more
PATCHES: Final = 196  # that occlusion removes one by one: 14 x 14 of a ViT at 224 px
CHANNELS: Final = 192  # of the target layer, at least: ScoreCAM and AblationCAM run one forward for each
LAST_BLOCKS: Final = 2  # of a language-image model that LeGrad sums
