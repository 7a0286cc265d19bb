"""The options of `vitlens look`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument, option
from vitlens.commands.run.options import SharedOptions


@dataclass(frozen=True)
class LookOptions(SharedOptions):
    """images: files and folders; model: None for timm's weights on this disk, else a download, else the bundled ViT of
    digits; offline: whether nothing is downloaded; attention: an .npy of weights, which are looked at in the place of
    those of a model; image: the one that they are of; prefix: their tokens before the patches, None to find it."""

    images: tuple[str, ...] = argument("[IMAGE...]", "Photographs, or folders of them.", default=())
    model: str | None = option(
        "--model",
        "One model, as other commands take it (default: timm's smallest ViT in the caches of the hubs, else DeiT-tiny, "
        "downloaded once (23 MB), else vit-digits).",
        metavar="MODEL",
        shown=False,
        complete="model",
    )
    offline: bool = option("--offline", "Download nothing: only what lies on this disk.", default=False)
    attention: Path | None = option(
        "--attention",
        "Show the attention weights of any model instead: an .npy (layers, heads, tokens, tokens) of one image.",
        metavar="FILE.npy",
    )
    image: str | None = option("--image", "The image of --attention.", default=None, metavar="IMAGE")
    prefix: int | None = option(
        "--prefix",
        "Tokens before the patches in --attention (default: the fewest that leave a square).",
        metavar="N",
        low=0,
        shown=False,
    )
