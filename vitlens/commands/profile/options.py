"""The options of `vitlens profile`."""

from dataclasses import dataclass
from functools import partial

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import SharedOptions, several_models
from vitlens.commands.run.parsing import counts, many_side_lengths
from vitlens.errors import InputError

_list = partial(option, default=(), metavar="LIST", shown=False)


@dataclass(frozen=True)
class ProfileOptions(SharedOptions):
    """The cost of models; those without weights of their own are untrained.

    patch_sizes: each ViT preset is built with each of them; sizes: of images (height, width), which vary the number of
    tokens (empty: from half to double each model's side; with several patch sizes these vary it); batch_sizes: empty
    for 1, 2, 4 ... until a pass takes longer than a second. Raises InputError for --limit: the images are random
    pixels.
    """

    models: tuple[str, ...] = several_models()
    patch_sizes: tuple[tuple[int, int], ...] = _list(
        "--patch-size", "Patch sizes in pixels with which ViT presets are built, e.g. 4,8,16.", parse=many_side_lengths
    )
    sizes: tuple[tuple[int, int], ...] = _list(
        "--sizes",
        "Image sizes (N or HxW) that vary the number of tokens (default: half to double its side).",
        parse=many_side_lengths,
    )
    batch_sizes: tuple[int, ...] = _list(
        "--batch-sizes", "Batch sizes (default: 1, 2, 4 ... until a pass takes more than a second).", parse=counts
    )

    def __post_init__(self) -> None:
        if self.run.limit is not None:
            raise InputError(
                f"expected no --limit, found {self.run.limit}: profile measures on random pixels; try --batch-sizes"
            )
