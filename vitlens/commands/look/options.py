"""The options of `vitlens look`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument, option
from vitlens.commands.run.options import SharedOptions


@dataclass(frozen=True)
class LookOptions(SharedOptions):
    """Images and model, or an array of attention weights with its image."""

    images: tuple[str, ...] = argument("[IMAGE...]", "Photographs, or folders of them.", default=())
    model: str | None = option(
        "--model",
        "One model, as for other commands (default: timm's smallest ViT in the hubs' caches, "
        "else DeiT-tiny, which is downloaded once (23 MB), else vit-digits).",
        metavar="MODEL",
        shown=False,
        complete="model",
    )
    offline: bool = option(
        "--offline", "Download nothing; use only files on this disk.", default=False
    )
    attention: Path | None = option(
        "--attention",
        "Show attention weights of any model instead: an .npy (layers, heads, tokens, tokens) of "
        "one image.",
        metavar="FILE.npy",
    )
    image: str | None = option(
        "--image", "The image of --attention.", default=None, metavar="IMAGE"
    )
    prefix: int | None = option(
        "--prefix",
        "Tokens before the patches in --attention (default: the fewest that leave a square of "
        "patches).",
        metavar="N",
        low=0,
        shown=False,
    )
