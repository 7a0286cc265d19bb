"""The variants that `vitlens study --kind` trains: every kind of study as a literal list of
variants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from vitlens.training.objectives.registry import CLASSIFY

Overrides: TypeAlias = Mapping[str, Any]  # of a preset's shape, as models.rebuild takes them
Part: TypeAlias = Literal["all", "last", "head", "none"]
Start: TypeAlias = Literal["random", "pretrained"]
Extra: TypeAlias = Literal["fields", "cut", "positions", "inside", "pretraining"]

SEEDS: Final = 3
# Epochs without --epochs: enough to rank variants on a laptop, too few for a model's best accuracy.
EPOCHS: Final[Mapping[str, int]] = MappingProxyType({"digits": 6, "digits-shortcut": 6})
OTHER_EPOCHS: Final = 20
# of a model that is adapted; its frozen variant has cached features and more epochs
ADAPTING_EPOCHS: Final = 10


@dataclass(frozen=True)
class Variant:
    """One model of a study, trained once for each seed.

    label: its name in folders and metrics. words: its name in figures and tables. preset: its
    architecture ("": that of MODEL). shape: the differences from the preset's. start: its first
    weights. trained: the part that is trained. teacher: the label of the variant whose outputs it
    learns from, too. objective: of its training, see training/objectives. share: of the training
    images, fixed and repeated (None: all, as in training). line: its line in the chart over the
    number of images. against: the labels of the variants that it is compared with ((): the first).
    base: the label of the variant from which it differs in one factor and with which it is
    compared, too. candidate: True if it may be chosen.
    """

    label: str
    words: str
    preset: str = "vit-mini"
    shape: Overrides = field(default_factory=dict)
    start: Start = "random"
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
        """Return True if any of it is trained."""
        return self.trained != "none"


@dataclass(frozen=True)
class Kind:
    """A study: its title, its variants in order, what it does not try, and notes on its design.

    extra: measured in addition to accuracy: receptive fields, an image cut into patches, the order
    of position embeddings, changes inside a model that is adapted, or features. data, epochs: the
    defaults (epochs None: by the data).
    """

    title: str
    variants: tuple[Variant, ...]
    untried: str
    notes: tuple[str, ...] = ()
    extra: Extra | None = None
    data: str = "digits"
    epochs: int | None = None

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Return the labels of each variant that differs from another in one factor, and of that
        other.
        """
        return tuple((variant.label, variant.base) for variant in self.variants if variant.base)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the labels of each variant and of those that it is compared with."""
        first, *later = self.variants
        pairs = []
        for variant in later:
            against = variant.against
            if not against and variant.candidate:
                against = (first.label,)
            for label in against:
                pairs.append((variant.label, label))
        return tuple(pairs)

    @property
    def adapts(self) -> bool:
        """Return True if its variants are forms of one trained MODEL."""
        return not self.variants[0].preset


# vit-mini at half its width: a quarter of the arithmetic, so that a laptop can train every variant
# several times.
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
_WITH_AND_WITHOUT: Final = ("random", "supervised")  # no training, and training with labels
_SHARES: Final = (5, 25, 100)
_ADAPTED_SHARES: Final = (20, 50)
_ADAPTED: Final[tuple[tuple[str, str, Start, Part], ...]] = (
    ("scratch", "from scratch", "random", "all"),
    ("frozen", "frozen", "pretrained", "head"),
    ("full", "full", "pretrained", "all"),
)  # label, words, start and trained part of the ways that are trained on fewer images, too

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "architecture": Kind(
            "A vision transformer, one part at a time",
            (
                Variant(
                    "no-attention",
                    "no attention (an MLP)",
                    shape={**_BARE, "attention": False, "mlp": True},
                ),
                Variant(
                    "one-head",
                    "attention, one head",
                    shape={**_BARE, "heads": 1},
                    base="no-attention",
                ),
                Variant("four-heads", "four heads", shape=_BARE, base="one-head"),
                Variant(
                    "residual",
                    "+ residual connection",
                    shape={**_BARE, "residual": True},
                    base="four-heads",
                ),
                Variant(
                    "norm",
                    "+ norm",
                    shape={**_BARE, "residual": True, "norm": True},
                    base="residual",
                ),
                Variant("mlp", "+ MLP: a whole block", shape=_BLOCK, base="norm"),
                Variant(
                    "post-norm",
                    "the block post-norm",
                    shape={**_BLOCK, "norm_first": False},
                    base="mlp",
                ),
                Variant("depth-2", "depth 2", shape={**_BLOCK, "depth": 2}, base="mlp"),
                Variant("depth-4", "depth 4", shape={**_BLOCK, "depth": 4}, base="depth-2"),
                Variant("depth-6", "depth 6", shape={**_BLOCK, "depth": 6}, base="depth-4"),
            ),
            "other widths and patch sizes, other orders of adding the parts, a separate learning "
            "rate for each variant, and more data",
            (
                "All variants have dim 64, patch 4 and position embeddings, and classify by the "
                "mean of the patches: without attention a CLS token would receive nothing from "
                "them.",
                "The first variant has an MLP in place of attention; the next ones have "
                "attention and no MLP, until one adds it again. The depth is 1 unless it is "
                "given.",
                "Norms stand before attention and MLP (pre-norm) and once before the classifier; "
                "a post-norm block has them after each addition, without that last norm. Later "
                "variants change the pre-norm block.",
            ),
        ),
        "patch-size": Kind(
            "Patch size",
            (
                Variant("patch-4", "patch 4 px", shape={**_SMALL, "patch_size": [4, 4]}),
                Variant("patch-8", "patch 8 px", shape={**_SMALL, "patch_size": [8, 8]}),
                Variant("patch-16", "patch 16 px", shape={**_SMALL, "patch_size": [16, 16]}),
            ),
            "larger images (a patch of 4 px at 32 px covers as much as one of 28 px at 224 px), "
            "objects of other sizes, a separate width or depth for each patch size, and tasks "
            "that need fine maps",
            (
                _BASE,
                "Halving the patch size makes four times as many tokens; the cost of attention "
                "grows with the square of their number.",
            ),
            extra="cut",
        ),
        "pooling": Kind(
            "Pooling before the classifier",
            (
                Variant("cls", "CLS token", shape={**_SMALL, "pooling": "cls"}),
                Variant("mean", "mean of the patches", shape={**_SMALL, "pooling": "mean"}),
            ),
            "larger models, attention pooling, both poolings together, and uses of the features "
            "other than classification",
            (_BASE,),
        ),
        "size": Kind(
            "Size of the model",
            (
                Variant("vit-mini", "vit-mini", "vit-mini"),
                Variant("vit-micro", "vit-micro", "vit-micro"),
                Variant("vit-tiny", "vit-tiny", "vit-tiny"),
            ),
            "a separate recipe for each size, more data, and sizes other than these presets",
            ("The unchanged presets: dim 128, depth 4; dim 128, depth 6; dim 192, depth 6.",),
        ),
        "data": Kind(
            "Share of the training data",
            (
                *(
                    Variant(
                        f"vit-{share}",
                        f"ViT, {share} %",
                        shape=_SMALL,
                        share=share / 100,
                        line="ViT",
                    )
                    for share in _SHARES
                ),
                *(
                    Variant(
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
            "pretrained weights, a separate recipe for each share, larger models, and more images "
            "than there were",
            (
                "The ViT is `vit-mini` at half its width (dim 64, depth 4, 4 heads, patch 4), the "
                "CNN is `resnet20`.",
                "The number of optimiser steps is the same at every share: a share is repeated "
                "to the size of the whole set, so the images of small shares are seen more "
                "often. Shares are class-balanced and nested, and drawn anew for each seed. "
                "Images are fixed: scenes that are otherwise drawn anew every epoch stay those "
                "of the first epoch.",
            ),
        ),
        "registers": Kind(
            "Register tokens",
            (
                Variant("registers-0", "0 registers", shape={**_SMALL, "registers": 0}),
                Variant("registers-1", "1 register", shape={**_SMALL, "registers": 1}),
                Variant("registers-4", "4 registers", shape={**_SMALL, "registers": 4}),
            ),
            "large models and long training, in which high-norm tokens appear (Darcet 2024), and "
            "tasks that need clean maps rather than accuracy",
            (
                _BASE,
                "Registers (Darcet 2024) absorb high-norm tokens, which small models may not have.",
            ),
        ),
        "positions": Kind(
            "Position embeddings",
            (
                Variant("none", "none", shape={**_SMALL, "positions": "none"}),
                Variant("sine", "fixed 1-D sine-cosine", shape={**_SMALL, "positions": "sine"}),
                Variant(
                    "sine-2d", "fixed 2-D sine-cosine", shape={**_SMALL, "positions": "sine-2d"}
                ),
                Variant("learned", "learned 1-D", shape={**_SMALL, "positions": "learned"}),
            ),
            "relative and rotary positions, images of another size than in training (where "
            "learned embeddings are interpolated and fixed ones computed again), and data in "
            "which places matter more or less",
            (
                _BASE,
                "Without position embeddings the model is invariant to the order of the patches. "
                "The 1-D sines are those of Vaswani 2017, of the patch's number row by row; the "
                "2-D ones those of MAE (He 2022), half of the dimensions for the column and half "
                "for the row; learned ones begin as noise. The root mean square of the sines is "
                "0.71, that of the noise 0.88.",
            ),
            extra="positions",
        ),
        "swin": Kind(
            "Attention in windows",
            (
                Variant("vit", "ViT", shape={**_SMALL, "dim": 72}),
                Variant("swin", "Swin", "swin-micro", shape=_WINDOWED),
                Variant(
                    "swin-no-shift",
                    "Swin without shift",
                    "swin-micro",
                    shape={**_WINDOWED, "shift": False},
                    against=("swin",),
                ),
                Variant("cnn", "CNN", "resnet20"),
            ),
            "larger images, where the ViT's attention grows with the square of the number of "
            "patches and Swin's with the number (`vitlens profile vit-micro swin-micro --sizes "
            "32,64,128`); a separate recipe for each; pretrained weights; tasks that need maps, "
            "such as segmentation",
            (
                "About equal parameters: the ViT is `vit-mini` with dim 72, patch 4; the Swin is "
                "`swin-micro` with dim 22, patch 2, windows of 4x4 patches; the CNN is "
                "`resnet20`. The ViT and both Swins share a recipe, the CNN has another one with "
                "the same batch size.",
                "Without shift, patches of different windows meet only where patches are merged.",
            ),
            extra="fields",
        ),
        "transfer": Kind(
            "A trained model adapted to other data",
            (
                Variant("scratch", "from scratch", "", line="from scratch"),
                Variant("frozen", "frozen", "", start="pretrained", trained="head", line="frozen"),
                Variant("last-blocks", "last blocks", "", start="pretrained", trained="last"),
                Variant(
                    "full",
                    "full",
                    "",
                    start="pretrained",
                    line="full",
                    against=("scratch", "frozen", "last-blocks"),
                ),
                Variant("distilled", "distilled", "", teacher="full"),
                *(
                    Variant(
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
                "Frozen: only a new head, on features of the unchanged model. Last blocks: the "
                "last quarter of the blocks and a new head. Full: all weights. From scratch: the "
                "same architecture from random weights. Distilled: from scratch, but also "
                "learning from the outputs of the fully trained model.",
                "Learning rates are fixed, from trials on other images: training from random "
                "weights takes larger steps. All variants except the frozen one have the same "
                "epochs and augmentation; the frozen one computes its features once. Fewer "
                "images are repeated, so that the number of steps is the same.",
            ),
            extra="inside",
        ),
        "pretraining": Kind(
            "Learning with and without labels",
            (
                Variant("random", "random weights", shape=_SMALL, trained="none"),
                Variant("supervised", "supervised", shape=_SMALL, against=("random",)),
                Variant("mae", "MAE", shape=_SMALL, objective="mae", against=_WITH_AND_WITHOUT),
                Variant("dino", "DINO", shape=_SMALL, objective="dino", against=_WITH_AND_WITHOUT),
                Variant("clip", "CLIP", shape=_SMALL, objective="clip", against=_WITH_AND_WITHOUT),
            ),
            "larger models and images, a thousand times more images as in the papers, a separate "
            "budget for each objective, photographs, and fine-tuning of all weights, at which "
            "MAE is best in its paper (He 2022)",
            (
                f"{_BASE} Accuracy is that of a linear probe on frozen features of all training "
                "images: the same "
                f"measure for "
                "all variants, with or without a classifier.",
                "Features are the CLS token and the mean of the patches of the last layer, side "
                "by side, for all variants. The supervised variant has seen the labels, CLIP has "
                "seen captions that name the class; MAE and DINO have seen neither.",
                "All trainings have the same number of epochs and steps; a step of DINO needs "
                "the most passes, as it sees several crops. Random weights are those with which "
                "the other variants begin.",
            ),
            extra="pretraining",
            data="shapes",
            epochs=30,
        ),
    }
)
