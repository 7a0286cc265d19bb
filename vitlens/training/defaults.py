"""What training and its reports share, free of torch."""

from typing import Final

KEPT_FOLDER: Final = "kept"  # of weights that a run keeps on its way
LEAST_STEPS: Final = 10  # batches in an epoch, where the recipe decides how large they are
