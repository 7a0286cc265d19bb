"""The options of `vitlens look`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import argument, bundle, option
from vitlens.commands.run.options import ModelOptions, RunOptions


@dataclass(frozen=True)
class LookOptions:
    """images: files and folders; model: None for timm's weights on this disk, else the bundled ViT of digits."""

    images: tuple[str, ...] = argument("IMAGE...", "Photographs, or folders of them.")
    model: str | None = option(
        "--model",
        "One model, as other commands take it (default: timm's first ViT in the caches of the hubs, else vit-digits).",
        default=None,
        metavar="MODEL",
        shown=False,
        complete="model",
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
