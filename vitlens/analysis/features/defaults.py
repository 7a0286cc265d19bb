"""Defaults that functions here share with the command line; free of torch."""

from typing import Final

VOTERS: Final = (1, 5, 20)  # nearest neighbours that vote
PERPLEXITY: Final = 30.0  # of t-SNE
