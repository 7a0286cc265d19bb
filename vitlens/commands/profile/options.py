"""What `vitlens profile` is told."""

from dataclasses import dataclass

from vitlens.commands.scaffold.flags import bundle, option
from vitlens.commands.scaffold.options import ModelOptions, RunOptions, several_models
from vitlens.commands.scaffold.parsing import counts, many_side_lengths
from vitlens.errors import InputError


@dataclass(frozen=True)
class ProfileOptions:
    """The cost of models; those without weights of their own are untrained.

    patch_sizes: ViT presets are taken with each; sizes: images (height, width) by which the number of tokens is varied
    (none: from half to double each model's side; with several patch sizes, by these); batch_sizes: none for 1, 2, 4 ...
    until a pass takes longer than a second. Raises InputError for --limit: the images are random pixels.
    """

    models: tuple[str, ...] = several_models()
    patch_sizes: tuple[tuple[int, int], ...] = option(
        "--patch-size",
        "Take ViT presets with each of these, in pixels; e.g. 4,8,16.",
        default=(),
        metavar="LIST",
        parse=many_side_lengths,
        shown=False,
    )
    sizes: tuple[tuple[int, int], ...] = option(
        "--sizes",
        "Images (N or HxW) that vary the number of tokens (default: half to double).",
        default=(),
        metavar="LIST",
        parse=many_side_lengths,
        shown=False,
    )
    batch_sizes: tuple[int, ...] = option(
        "--batch-sizes",
        "Default: 1, 2, 4 ... until a pass takes more than a second.",
        default=(),
        metavar="LIST",
        parse=counts,
        shown=False,
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)

    def __post_init__(self) -> None:
        if self.run.limit is not None:
            raise InputError(
                f"expected no --limit, found {self.run.limit}: profile takes random pixels; try --batch-sizes"
            )
