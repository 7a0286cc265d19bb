"""The options of `vitlens profile`."""

from dataclasses import dataclass
from functools import partial

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import SharedOptions, several_models
from vitlens.commands.run.parsing import counts, many_side_lengths
from vitlens.errors import InputError

_list_option = partial(option, default=(), metavar="LIST", shown=False)


@dataclass(frozen=True)
class ProfileOptions(SharedOptions):
    """The models whose cost is measured, and the patch sizes, image sizes and batch sizes.

    patch_sizes: (height, width), with which each ViT preset is built.
    sizes: (height, width) of images, which vary the number of tokens; empty for half to double each
        model's input size.
    batch_sizes: empty for 1, 2, 4 ... until a pass takes more than a second.

    Raises InputError for --limit, because the images are random pixels.
    """

    models: tuple[str, ...] = several_models()
    patch_sizes: tuple[tuple[int, int], ...] = _list_option(
        "--patch-size",
        "Build ViT presets with these patch sizes in pixels, e.g. 4,8,16.",
        parse=many_side_lengths,
    )
    sizes: tuple[tuple[int, int], ...] = _list_option(
        "--sizes",
        "Vary the number of tokens with these image sizes, N or HxW (default: half to double the "
        "input size).",
        parse=many_side_lengths,
    )
    batch_sizes: tuple[int, ...] = _list_option(
        "--batch-sizes",
        "Time these batch sizes (default: 1, 2, 4 ... until a pass takes more than a second).",
        parse=counts,
    )

    def __post_init__(self) -> None:
        if self.run.limit is not None:
            raise InputError(
                f"expected no --limit, found {self.run.limit}: profile measures on random pixels; "
                "try --batch-sizes"
            )
