"""Constants that training shares with its reports; free of torch."""

from typing import Final

KEPT_FOLDER: Final = "kept"  # of the weights kept at intervals of epochs
LEAST_STEPS: Final = 10  # smallest number of batches in an epoch, where the batch size comes from the recipe
