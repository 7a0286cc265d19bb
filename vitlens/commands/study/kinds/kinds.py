"""The points that `vitlens study --kind` trains: every kind of study as a literal list of points."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from vitlens.training.objectives.registry import CLASSIFY

Overrides: TypeAlias = Mapping[str, Any]  # of a preset's shape, as models.rebuild takes them
Part: TypeAlias = Literal["all", "last", "head", "none"]
Also: TypeAlias = Literal["fields", "cut", "positions", "inside", "pretraining"]

SEEDS: Final = 3
# Epochs without --epochs: enough to rank points on a laptop, too few for a model's best accuracy.
EPOCHS: Final[Mapping[str, int]] = MappingProxyType({"digits": 6, "digits-shortcut": 6})
OTHER_EPOCHS: Final = 20
ADAPTING_EPOCHS: Final = 10  # of a model that is adapted; its frozen point has cached features and more epochs


@dataclass(frozen=True)
class Point:
    """One model of a study, trained once for each seed.

    label: its name in folders and metrics; words: its name in figures and tables; preset: its architecture ("":
    that of MODEL); shape: the differences from the preset's; start: its first weights; trained: the part that is
    trained; teacher: the point from whose outputs it learns, too; objective: of its training, see
    training/objectives; share: of the training images, fixed and repeated (None: all, as in training); line: of a
    chart over the number of images; against: the labels of the points that it is compared with ((): the first);
    base: the label of the point from which it differs in one factor, with which it is compared, too; candidate:
    whether the decision may take it.
    """

    label: str
    words: str
    preset: str = "vit-mini"
    shape: Overrides = field(default_factory=dict)
    start: Literal["random", "pretrained"] = "random"
    trained: Part = "all"
    teacher: str = ""
    objective: str = CLASSIFY
    share: float | None = None
    line: str = ""
    against: tuple[str, ...] = ()
    base: str = ""
    candidate: bool = True

    @property
    def is_trained(self) -> bool:
        """Return True if it is trained at all."""
        return self.trained != "none"


@dataclass(frozen=True)
class Kind:
    """A study: its title, its points in order, what it leaves open, and notes on its design.

    also: what is measured beside accuracies: receptive fields, an image cut into patches, the order of position
    embeddings, what changed inside a model that is adapted, features; data, epochs: where the user names none (None:
    by the data).
    """

    title: str
    points: tuple[Point, ...]
    untried: str
    notes: tuple[str, ...] = ()
    also: Also | None = None
    data: str = "digits"
    epochs: int | None = None

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Return the labels of each point that differs from another in one factor, and of that one."""
        return tuple((point.label, point.base) for point in self.points if point.base)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the labels of each point and of those that it is compared with."""
        first = (self.points[0].label,)
        own = {point.label: point.against or (first if point.candidate else ()) for point in self.points[1:]}
        return tuple((label, other) for label, against in own.items() for other in against)

    @property
    def adapts(self) -> bool:
        """Return True if its points are forms of one trained MODEL."""
        return not self.points[0].preset


# vit-mini at half its width: a quarter of the arithmetic, so that a laptop can train every point several times.
_SMALL: Final[Overrides] = {"dim": 64, "heads": 4, "depth": 4}
_BARE: Final[Overrides] = {
    **_SMALL,
    "depth": 1,
    "pooling": "mean",
    "residual": False,
    "norm": False,
    "mlp": False,
}
_BLOCK: Final[Overrides] = {**_SMALL, "depth": 1, "pooling": "mean"}
_BASE: Final = "The base is `vit-mini` at half its width: dim 64, depth 4, 4 heads, patch 4."
_WINDOWED: Final[Overrides] = {"dim": 22, "depths": [2, 2, 2], "heads": [2, 4, 8]}
_SHARES: Final = (5, 25, 100)
_ADAPTED_SHARES: Final = (20, 50)
_ADAPTED: Final[tuple[tuple[str, str, Literal["random", "pretrained"], Part], ...]] = (
    ("scratch", "from scratch", "random", "all"),
    ("frozen", "frozen", "pretrained", "head"),
    ("full", "full", "pretrained", "all"),
)  # label, words, start and trained part of the ways that are trained on fewer images, too

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "architecture": Kind(
            "A vision transformer, one part at a time",
            (
                Point("no-attention", "no attention (an MLP)", shape={**_BARE, "attention": False, "mlp": True}),
                Point("one-head", "attention, one head", shape={**_BARE, "heads": 1}, base="no-attention"),
                Point("four-heads", "four heads", shape=_BARE, base="one-head"),
                Point("residual", "+ residual connection", shape={**_BARE, "residual": True}, base="four-heads"),
                Point("norm", "+ norm", shape={**_BARE, "residual": True, "norm": True}, base="residual"),
                Point("mlp", "+ MLP: a whole block", shape=_BLOCK, base="norm"),
                Point("post-norm", "the block post-norm", shape={**_BLOCK, "norm_first": False}, base="mlp"),
                Point("depth-2", "depth 2", shape={**_BLOCK, "depth": 2}, base="mlp"),
                Point("depth-4", "depth 4", shape={**_BLOCK, "depth": 4}, base="depth-2"),
                Point("depth-6", "depth 6", shape={**_BLOCK, "depth": 6}, base="depth-4"),
            ),
            "other widths and patch sizes, other orders of adding the parts, a separate learning rate for each "
            "variant, and more data",
            (
                "All variants have dim 64, patch 4 and position embeddings, and classify by the mean of the patches: "
                "without attention a CLS token would receive nothing from them.",
                "The first variant has an MLP in place of attention; the next ones have attention and no MLP, until "
                "one adds it again. The depth is 1 unless it is given.",
                "Norms stand before attention and MLP (pre-norm) and once before the classifier; a post-norm block has "
                "them after each addition, without that last norm. Later variants change the pre-norm block.",
            ),
        ),
        "patch-size": Kind(
            "Patch size",
            tuple(
                Point(f"patch-{side}", f"patch {side} px", shape={**_SMALL, "patch_size": [side, side]})
                for side in (4, 8, 16)
            ),
            "larger images (a patch of 4 px at 32 px covers as much as one of 28 px at 224 px), objects of other "
            "sizes, a separate width or depth for each patch size, and tasks that need fine maps",
            (
                _BASE,
                "Halving the patch size makes four times as many tokens; the cost of attention grows with the square "
                "of their number.",
            ),
            also="cut",
        ),
        "pooling": Kind(
            "Pooling before the classifier",
            (
                Point("cls", "CLS token", shape={**_SMALL, "pooling": "cls"}),
                Point("mean", "mean of the patches", shape={**_SMALL, "pooling": "mean"}),
            ),
            "larger models, attention pooling, both poolings together, and uses of the features "
            "other than classification",
            (_BASE,),
        ),
        "size": Kind(
            "Size of the model",
            (
                Point("vit-mini", "vit-mini", "vit-mini"),
                Point("vit-micro", "vit-micro", "vit-micro"),
                Point("vit-tiny", "vit-tiny", "vit-tiny"),
            ),
            "a separate recipe for each size, more data, and sizes other than these presets",
            ("The unchanged presets: dim 128, depth 4; dim 128, depth 6; dim 192, depth 6.",),
        ),
        "data": Kind(
            "Share of the training data",
            (
                *(
                    Point(f"vit-{share}", f"ViT, {share} %", shape=_SMALL, share=share / 100, line="ViT")
                    for share in _SHARES
                ),
                *(
                    Point(
                        f"cnn-{share}",
                        f"CNN, {share} %",
                        "resnet20",
                        share=share / 100,
                        line="CNN",
                        against=(f"vit-{share}",),
                    )
                    for share in _SHARES
                ),
            ),
            "pretrained weights, a separate recipe for each share, larger models, and more images than there were",
            (
                "The ViT is `vit-mini` at half its width (dim 64, depth 4, 4 heads, patch 4), the CNN is `resnet20`.",
                "The number of optimiser steps is the same at every share: a share is repeated to the size of the "
                "whole set, so the images of small shares are seen more often. Shares are class-balanced and nested, "
                "and drawn anew for each seed. Images are fixed: scenes that are otherwise drawn anew every epoch stay "
                "those of the first epoch.",
            ),
        ),
        "registers": Kind(
            "Register tokens",
            tuple(
                Point(
                    f"registers-{count}",
                    f"{count} register{'' if count == 1 else 's'}",
                    shape={**_SMALL, "registers": count},
                )
                for count in (0, 1, 4)
            ),
            "large models and long training, in which high-norm tokens appear (Darcet 2024), and tasks that need "
            "clean maps rather than accuracy",
            (_BASE, "Registers (Darcet 2024) absorb high-norm tokens, which small models may not have."),
        ),
        "positions": Kind(
            "Position embeddings",
            (
                Point("none", "none", shape={**_SMALL, "positions": "none"}),
                Point("sine", "fixed 1-D sine-cosine", shape={**_SMALL, "positions": "sine"}),
                Point("sine-2d", "fixed 2-D sine-cosine", shape={**_SMALL, "positions": "sine-2d"}),
                Point("learned", "learned 1-D", shape={**_SMALL, "positions": "learned"}),
            ),
            "relative and rotary positions, images of another size than in training (where learned embeddings are "
            "interpolated and fixed ones computed again), and data in which places matter more or "
            "less",
            (
                _BASE,
                "Without position embeddings the model is invariant to the order of the patches. The 1-D sines are "
                "those of Vaswani 2017, of the patch's number row by row; the 2-D ones those of MAE (He 2022), half of "
                "the dimensions for the column and half for the row; learned ones begin as noise. The root mean square "
                "of the sines is 0.71, that of the noise 0.88.",
            ),
            also="positions",
        ),
        "swin": Kind(
            "Attention in windows",
            (
                Point("vit", "ViT", shape={**_SMALL, "dim": 72}),
                Point("swin", "Swin", "swin-micro", shape=_WINDOWED),
                Point(
                    "swin-no-shift",
                    "Swin without shift",
                    "swin-micro",
                    shape={**_WINDOWED, "shift": False},
                    against=("swin",),
                ),
                Point("cnn", "CNN", "resnet20"),
            ),
            "larger images, where the ViT's attention grows with the square of the number of patches and Swin's "
            "with the number (`vitlens profile vit-micro swin-micro --sizes 32,64,128`); a "
            "separate recipe for each; pretrained weights; tasks that need maps, such as segmentation",
            (
                "About equal parameters: the ViT is `vit-mini` with dim 72, patch 4; the Swin is `swin-micro` with dim "
                "22, patch 2, windows of 4x4 patches; the CNN is `resnet20`. The ViT and both Swins have one recipe, "
                "the CNN has its own, with batches of the same size.",
                "Without shift, patches of different windows meet only where patches are merged.",
            ),
            also="fields",
        ),
        "transfer": Kind(
            "A trained model adapted to other data",
            (
                Point("scratch", "from scratch", "", line="from scratch"),
                Point("frozen", "frozen", "", start="pretrained", trained="head", line="frozen"),
                Point("last-blocks", "last blocks", "", start="pretrained", trained="last"),
                Point(
                    "full", "full", "", start="pretrained", line="full", against=("scratch", "frozen", "last-blocks")
                ),
                Point("distilled", "distilled", "", teacher="full"),
                *(
                    Point(
                        f"{label}-{share}",
                        f"{words}, {share} % of the images",
                        "",
                        start=start,
                        trained=trained,
                        share=share / 100,
                        line=words,
                        candidate=False,
                        against=(f"scratch-{share}",) if label != "scratch" else (),
                    )
                    for share in _ADAPTED_SHARES
                    for label, words, start, trained in _ADAPTED
                ),
            ),
            "more images, other models and teachers, other augmentation than mirroring, another "
            "number of last blocks, and test images from another source",
            (
                "Frozen: only a new head, on features of the unchanged model. Last blocks: the last quarter of the "
                "blocks and a new head. Full: all weights. From scratch: the same architecture from random weights. "
                "Distilled: from scratch, but also learning from the outputs of the fully trained model.",
                "Learning rates are fixed, from trials on other images: training from random weights takes larger "
                "steps. All variants except the frozen one have the same epochs and augmentation; the frozen one "
                "computes its features once. Fewer images are repeated, so that the number of steps is the same.",
            ),
            also="inside",
        ),
        "pretraining": Kind(
            "Learning with and without labels",
            (
                Point("random", "random weights", shape=_SMALL, trained="none"),
                Point("supervised", "supervised", shape=_SMALL, against=("random",)),
                *(
                    Point(label, words, shape=_SMALL, objective=label, against=("random", "supervised"))
                    for label, words in (("mae", "MAE"), ("dino", "DINO"), ("clip", "CLIP"))
                ),
            ),
            "larger models and images, the thousand times more images of the papers, a separate budget for each "
            "objective, photographs, and fine-tuning of all weights, at which MAE is best in its paper (He 2022)",
            (
                f"{_BASE} Accuracy is that of a linear probe on frozen features of all training images: the same "
                f"measure for "
                "all variants, with or without a classifier.",
                "Features are the CLS token and the mean of the patches of the last layer, side by side, for all "
                "variants. The supervised variant has seen the labels, CLIP has seen captions that name the class; MAE "
                "and DINO have seen neither.",
                "All trainings have the same number of epochs and steps; a step of DINO needs the most passes, as it "
                "sees several crops. Random weights are those with which the other variants begin.",
            ),
            also="pretraining",
            data="shapes",
            epochs=30,
        ),
    }
)
