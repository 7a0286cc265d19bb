"""The points that `vitlens study --kind` trains: every kind of study as a literal list of points."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

Overrides: TypeAlias = Mapping[str, Any]  # of a preset's shape, as models.assembly takes them

SEEDS: Final = 3
# Epochs without --epochs: enough to rank points on a laptop, too few for a model's best accuracy.
EPOCHS: Final[Mapping[str, int]] = MappingProxyType({"digits": 6})
OTHER_EPOCHS: Final = 20


@dataclass(frozen=True)
class Point:
    """One model of a study, trained once for each seed.

    label: its name in folders and metrics; words: its name in figures and tables; shape, recipe: the differences from
    the preset's; share: of the training images, fixed and repeated (None: all, as in training); place: on the axis of a
    kind that has one; against: the label of the point that it is compared with ("": the first). variant: in a kind
    with steps, another form of the point before it, on which the following points do not build.
    """

    label: str
    words: str
    preset: str = "vit-mini"
    shape: Overrides = field(default_factory=dict)
    recipe: Mapping[str, object] = field(default_factory=dict)
    share: float | None = None
    place: float | None = None
    against: str = ""
    variant: bool = False


@dataclass(frozen=True)
class Kind:
    """A study: its title, its points in order, and notes on its design.

    axis: the label of the points' places on a logarithmic axis ("": one row a point); steps: whether each point
    changes one factor of the one before it (variants left out), so that these two are compared, too; fields: whether
    the effective receptive field of each point is measured; cuts: whether one image is shown as the patches of each
    point; positions: whether the similarity of each point's position embeddings is measured.
    """

    title: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    axis: str = ""
    steps: bool = False
    fields: bool = False
    cuts: bool = False
    positions: bool = False

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        """The labels of each point after the first and of the one that it changes: the last before it that is no
        variant."""
        pairs, base = [], self.points[0].label
        for point in self.points[1:]:
            pairs.append((point.label, base))
            base = base if point.variant else point.label
        return tuple(pairs)


# vit-mini at half its width: a quarter of the arithmetic, so that a laptop can train every point several times.
_SMALL: Final[Overrides] = {"dim": 64, "heads": 4, "depth": 4}
_BARE: Final[Overrides] = {
    **_SMALL, "depth": 1, "pooling": "mean", "residual": False, "norm": False, "mlp": False,
}  # fmt: skip
_BLOCK: Final[Overrides] = {**_SMALL, "depth": 1, "pooling": "mean"}
_BASE: Final = "The base is `vit-mini` at half its width: dim 64, depth 4, 4 heads, patch 4."
_WINDOWED: Final[Overrides] = {"dim": 22, "depths": [2, 2, 2], "heads": [2, 4, 8]}
_SHARES: Final = (5, 10, 25, 50, 100)

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "architecture": Kind(
            "A vision transformer, one part at a time",
            (
                Point("no-attention", "no attention (an MLP)", shape={**_BARE, "attention": False, "mlp": True}),
                Point("one-head", "attention, one head", shape={**_BARE, "heads": 1}),
                Point("four-heads", "four heads", shape=_BARE),
                Point("residual", "+ residual connection", shape={**_BARE, "residual": True}),
                Point("norm", "+ norm", shape={**_BARE, "residual": True, "norm": True}),
                Point("mlp", "+ MLP: a whole block", shape=_BLOCK),
                Point("post-norm", "the block post-norm", shape={**_BLOCK, "norm_first": False}, variant=True),
                Point("depth-2", "depth 2", shape={**_BLOCK, "depth": 2}),
                Point("depth-4", "depth 4", shape={**_BLOCK, "depth": 4}),
                Point("depth-6", "depth 6", shape={**_BLOCK, "depth": 6}),
            ),
            (
                "All points have dim 64, patch 4 and position embeddings, and classify by the mean of the patches: "
                "without attention a CLS token would receive nothing from them.",
                "The first point has an MLP in place of attention; the next ones have attention and no MLP, up to "
                "the point that adds it again. Depth is 1 where no depth is named.",
                "Norms stand before attention and MLP (pre-norm) and once before the classifier; a post-norm block has "
                "them after each addition, without that last norm, and the points after it change the pre-norm block.",
            ),
            steps=True,
        ),
        "patch-size": Kind(
            "Patch size",
            tuple(
                Point(
                    f"patch-{side}", f"patch {side} px", shape={**_SMALL, "patch_size": [side, side]},
                    place=float(side),
                )
                for side in (2, 4, 8, 16)
            ),
            (
                _BASE,
                "Halving the patch size makes four times as many tokens; the cost of attention grows with the square "
                "of their number.",
            ),
            axis="patch size (px)",
            cuts=True,
        ),
        "pooling": Kind(
            "Pooling before the classifier",
            (
                Point("cls", "CLS token", shape={**_SMALL, "pooling": "cls"}),
                Point("mean", "mean of the patches", shape={**_SMALL, "pooling": "mean"}),
            ),
            (_BASE,),
        ),
        "size": Kind(
            "Size of the model",
            (
                Point("vit-mini", "vit-mini", "vit-mini"),
                Point("vit-micro", "vit-micro", "vit-micro"),
                Point("vit-tiny", "vit-tiny", "vit-tiny"),
            ),
            ("The unchanged presets: dim 128, depth 4; dim 128, depth 6; dim 192, depth 6.",),
        ),
        "data": Kind(
            "Share of the training data",
            (
                *(
                    Point(f"vit-{share}", f"ViT, {share} %", shape=_SMALL, share=share / 100, place=float(share))
                    for share in _SHARES
                ),
                *(
                    Point(
                        f"cnn-{share}", f"CNN, {share} %", "resnet20", share=share / 100, place=float(share),
                        against=f"vit-{share}",
                    )
                    for share in _SHARES
                ),
            ),
            (
                "The ViT is `vit-mini` at half its width (dim 64, depth 4, 4 heads, patch 4), the CNN is `resnet20`.",
                "The number of optimiser steps is the same at every share: a share is repeated to the size of the "
                "whole set, so the images of small shares are seen more often. Shares are class-balanced and nested, "
                "and drawn anew for each seed. Images are fixed: scenes that are otherwise drawn anew every epoch stay "
                "those of the first epoch.",
            ),
            axis="share of the training images (%)",
        ),
        "registers": Kind(
            "Register tokens",
            tuple(
                Point(f"registers-{count}", f"{count} register{'' if count == 1 else 's'}",
                      shape={**_SMALL, "registers": count})
                for count in (0, 1, 4)
            ),
            (_BASE, "Registers (Darcet 2024) absorb high-norm tokens, which small models may not have."),
        ),
        "positions": Kind(
            "Position embeddings",
            (
                Point("none", "none", shape={**_SMALL, "positions": "none"}),
                Point("sine", "fixed, 1-D sine-cosine", shape={**_SMALL, "positions": "sine"}),
                Point("sine-2d", "fixed, 2-D sine-cosine", shape={**_SMALL, "positions": "sine-2d"}),
                Point("learned", "learned, 1-D", shape={**_SMALL, "positions": "learned"}),
            ),
            (
                _BASE,
                "Without position embeddings the model is invariant to the order of the patches. The 1-D sines are "
                "those of Vaswani 2017, of the patch's number row by row; the 2-D ones those of MAE (He 2022), half of "
                "the dimensions for the column and half for the row; learned ones begin as noise. The root mean square "
                "of the sines is 0.71, that of the noise 0.88.",
            ),
            positions=True,
        ),
        "swin": Kind(
            "Attention in windows",
            (
                Point("vit", "ViT", shape={**_SMALL, "dim": 72}),
                Point("swin", "Swin", "swin-micro", shape=_WINDOWED),
                Point("swin-no-shift", "Swin without shift", "swin-micro", shape={**_WINDOWED, "shift": False},
                      against="swin"),
                Point("cnn", "CNN", "resnet20"),
            ),
            (
                "About equal parameters: the ViT is `vit-mini` with dim 72, patch 4; the Swin is `swin-micro` with dim "
                "22, patch 2, windows of 4x4 patches; the CNN is `resnet20`. The ViT and both Swins have one recipe, "
                "the CNN has its own, with batches of the same size.",
                "Without shift, patches of different windows meet only where patches are merged.",
            ),
            fields=True,
        ),
    }
)  # fmt: skip

TRANSFER: Final = "transfer"  # a model to another data set, see transfer/regimes.py
KIND_NAMES: Final = (*KINDS, TRANSFER)


def epochs_for(data: str) -> int:
    """Epochs on a data set without --epochs."""
    return EPOCHS.get(data, OTHER_EPOCHS)
