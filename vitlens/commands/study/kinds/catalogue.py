"""Every kind of `vitlens study --kind`: `KINDS` lists its variants.

The shapes that several kinds share stand first, then the functions that make variants of a series.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from vitlens.commands.study.kinds.kinds import Kind, Overrides, Variant

# vit-mini at half its width: a quarter of the arithmetic, so that a laptop can train every variant
# several times.
_HALF: Final[Overrides] = {"dim": 64, "heads": 4, "depth": 4}
# Learned positions begin as noise: after 8 epochs of digits-clear the base had 89.4 % with them and
# 93.6 % with sines (3 seeds, reports/positions-digits).
_SINES: Final[Overrides] = {"positions": "sine-2d"}
_SMALL: Final[Overrides] = {**_HALF, **_SINES}
# A quarter of the tokens, so that a model of 14 M parameters can be trained on one core, too.
_COARSE: Final[Overrides] = {**_SINES, "patch_size": [8, 8]}
# one block of nothing but attention, without a residual connection, and a whole block
_BARE: Final[Overrides] = {
    **_SMALL,
    "depth": 1,
    "pooling": "mean",
    "residual": False,
    "norm": False,
    "mlp": False,
}
_BLOCK: Final[Overrides] = {**_SMALL, "depth": 1, "pooling": "mean"}
_HALF_BASE: Final = "The base is `vit-mini` at half its width: dim 64, depth 4, 4 heads, patch 4."
_BASE: Final = f"{_HALF_BASE} Its positions are fixed 2-D sines and cosines."
# a Swin of three stages, which is as small as the ViTs
_WINDOWED: Final[Overrides] = {"dim": 22, "depths": [2, 2, 2], "heads": [2, 4, 8]}
# The ViT of `swin` has about as many parameters as the Swin.
_WIDER: Final[Overrides] = {**_SMALL, "dim": 72}
_WITH_AND_WITHOUT: Final = ("random", "supervised")  # no training, and training with labels
_FEW: Final = 0.1  # share of the images on which a student learns with and without a teacher
_HIGH_RATE: Final = 2e-2  # five times the rate of the recipe for digits-clear


def _data_variants() -> tuple[Variant, ...]:
    """Return a ViT and a CNN on each share of the images, in percent.

    Smaller shares are trained twice: repeated to as many steps as all images have, and for as many
    epochs.
    """
    vits = []
    vits_of_equal_epochs = []
    cnns: list[Variant] = []
    cnns_of_equal_epochs = []
    for share in (5, 25, 100):
        vits.append(
            Variant(
                f"vit-{share}",
                f"ViT, {share} %",
                shape=_SMALL,
                share=share / 100,
                line="ViT",
            )
        )
        # with the ViT on its share, and with the CNN on the fewest images
        cnn_against = [f"vit-{share}"]
        if cnns:
            cnn_against.append(cnns[0].label)
        cnns.append(
            Variant(
                f"cnn-{share}",
                f"CNN, {share} %",
                preset="resnet20",
                share=share / 100,
                line="CNN",
                against=tuple(cnn_against),
            )
        )
        if share == 100:  # all images have as many epochs as steps
            continue
        vits_of_equal_epochs.append(
            Variant(
                f"vit-{share}-epochs",
                f"ViT, {share} %, equal epochs",
                shape=_SMALL,
                share=share / 100,
                repeated=False,
                line="ViT, equal epochs",
                against=(f"vit-{share}",),
            )
        )
        cnns_of_equal_epochs.append(
            Variant(
                f"cnn-{share}-epochs",
                f"CNN, {share} %, equal epochs",
                preset="resnet20",
                share=share / 100,
                repeated=False,
                line="CNN, equal epochs",
                against=(f"cnn-{share}", f"vit-{share}-epochs"),
            )
        )
    return (*vits, *vits_of_equal_epochs, *cnns, *cnns_of_equal_epochs)


def _window_variants() -> tuple[Variant, ...]:
    """Return Swins whose windows double."""
    variants: list[Variant] = []
    for side in (2, 4, 8):
        base = variants[-1].label if variants else ""
        variants.append(
            Variant(
                f"window-{side}",
                f"windows of {side} x {side} patches",
                preset="swin-micro",
                shape={**_WINDOWED, "window": [side, side]},
                base=base,
            )
        )
    return tuple(variants)


def _adapted_with_fewer_images() -> tuple[Variant, ...]:
    """Return three ways of adapting MODEL, on shares of the images, in percent."""
    variants = []
    for share in (20, 50):
        scratch = Variant(
            f"scratch-{share}",
            f"from scratch, {share} % of the images",
            preset="",
            share=share / 100,
            line="from scratch",
            candidate=False,
        )
        frozen = Variant(
            f"frozen-{share}",
            f"frozen, {share} % of the images",
            preset="",
            start="pretrained",
            trained="head",
            share=share / 100,
            line="frozen",
            candidate=False,
            against=(scratch.label,),
        )
        full = replace(
            frozen,
            label=f"full-{share}",
            words=f"full, {share} % of the images",
            trained="all",
            line="full",
        )
        variants += [scratch, frozen, full]
    return tuple(variants)


# Label and words of a variant stand first. `base` is one factor apart, `against` are other pairs.
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "architecture": Kind(
            "A vision transformer, one part at a time",
            variants=(
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
                Variant(
                    "depth-6",
                    "depth 6",
                    shape={**_BLOCK, "depth": 6},
                    against=("no-attention", "mlp"),
                    base="depth-4",
                ),
                Variant(
                    "post-norm-6",
                    "depth 6, post-norm",
                    shape={**_BLOCK, "depth": 6, "norm_first": False},
                    base="depth-6",
                ),
                Variant("depth-12", "depth 12", shape={**_BLOCK, "depth": 12}, base="depth-6"),
                Variant(
                    "post-norm-12",
                    "depth 12, post-norm",
                    shape={**_BLOCK, "depth": 12, "norm_first": False},
                    base="depth-12",
                ),
            ),
            untried=(
                "other widths and patch sizes, other orders of adding the parts, a separate "
                "learning rate for each variant, and more data"
            ),
            notes=(
                "All variants have dim 64, patch 4 and fixed 2-D positions, and classify by the "
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
            variants=(
                Variant("patch-2", "patch 2 px", shape={**_SMALL, "patch_size": [2, 2]}),
                Variant(
                    "patch-4",
                    "patch 4 px",
                    shape={**_SMALL, "patch_size": [4, 4]},
                    against=("patch-2",),
                ),
                Variant(
                    "patch-8",
                    "patch 8 px",
                    shape={**_SMALL, "patch_size": [8, 8]},
                    against=("patch-4",),
                ),
                Variant(
                    "patch-16",
                    "patch 16 px",
                    shape={**_SMALL, "patch_size": [16, 16]},
                    against=("patch-8",),
                ),
            ),
            untried=(
                "larger images (a patch of 4 px at 32 px covers as much as one of 28 px at 224 "
                "px), objects of other sizes, a separate width or depth for each patch size, and "
                "tasks that need fine maps"
            ),
            notes=(
                _BASE,
                "Halving the patch size makes four times as many tokens; the cost of attention "
                "grows with the square of their number.",
            ),
            extra="cut",
        ),
        "pooling": Kind(
            "Pooling before the classifier",
            variants=(
                Variant("cls", "CLS token", shape={**_SMALL, "pooling": "cls"}),
                Variant("mean", "mean of the patches", shape={**_SMALL, "pooling": "mean"}),
            ),
            untried=(
                "larger models, attention pooling, both poolings together, and uses of the "
                "features other than classification"
            ),
            notes=(_BASE,),
        ),
        "size": Kind(
            "Size of the model",
            variants=(
                Variant("vit-mini", "vit-mini", preset="vit-mini", shape=_COARSE),
                Variant("vit-micro", "vit-micro", preset="vit-micro", shape=_COARSE),
                Variant("vit-tiny", "vit-tiny", preset="vit-tiny", shape=_COARSE),
                Variant(
                    "vit-384",
                    "dim 384, depth 8",
                    preset="vit-tiny",
                    shape={**_COARSE, "dim": 384, "depth": 8, "heads": 6},
                ),
            ),
            untried="a separate recipe for each size, more data, and sizes other than these",
            notes=(
                "Three presets with patches of 8 px and fixed 2-D positions: dim 128, depth 4; dim "
                "128, depth 6; dim 192, depth 6. The largest has dim 384, depth 8 and 6 heads.",
            ),
        ),
        "data": Kind(
            "Share of the training data",
            variants=_data_variants(),
            untried=(
                "pretrained weights, a separate recipe for each share, larger models, and more "
                "images than there were"
            ),
            notes=(
                "The ViT is `vit-mini` at half its width (dim 64, depth 4, 4 heads, patch 4) with "
                "fixed 2-D positions, the CNN is `resnet20`.",
                "Every share is trained twice: with as many steps as all images have (it is "
                "repeated, so its images are seen more often), and with as many epochs (fewer "
                "steps). The difference of the two is hunger for steps, that of the shares with "
                "equal steps is hunger for data.",
                "Shares are class-balanced and nested, and drawn anew for each seed. Images are "
                "fixed: scenes that are otherwise drawn anew every epoch stay those of the first "
                "epoch.",
            ),
        ),
        "registers": Kind(
            "Register tokens",
            variants=(
                Variant("registers-0", "0 registers", shape={**_SMALL, "registers": 0}),
                Variant("registers-1", "1 register", shape={**_SMALL, "registers": 1}),
                Variant("registers-4", "4 registers", shape={**_SMALL, "registers": 4}),
            ),
            untried=(
                "large models and long training, in which high-norm tokens appear (Darcet 2024), "
                "and tasks that need clean maps rather than accuracy"
            ),
            notes=(
                _BASE,
                "Registers (Darcet 2024) absorb high-norm tokens, which small models may not have.",
            ),
            extra="sinks",
        ),
        "positions": Kind(
            "Position embeddings",
            variants=(
                Variant("none", "no positions", shape={**_SMALL, "positions": "none"}),
                Variant("learned", "learned 1-D", shape={**_SMALL, "positions": "learned"}),
                Variant(
                    "sine",
                    "fixed 1-D sine-cosine",
                    shape={**_SMALL, "positions": "sine"},
                    against=("none", "learned"),
                ),
                Variant(
                    "sine-2d",
                    "fixed 2-D sine-cosine",
                    shape={**_SMALL, "positions": "sine-2d"},
                    against=("none", "sine"),
                ),
            ),
            untried=(
                "relative and rotary positions, images of another size than in training (where "
                "learned embeddings are interpolated and fixed ones computed again), and data in "
                "which places matter more or less"
            ),
            notes=(
                _HALF_BASE,
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
            variants=(
                Variant("vit", "ViT", shape=_WIDER),
                Variant("swin", "Swin", preset="swin-micro", shape=_WINDOWED),
                Variant(
                    "swin-no-shift",
                    "Swin without shift",
                    preset="swin-micro",
                    shape={**_WINDOWED, "shift": False},
                    against=("swin",),
                ),
                Variant("cnn", "CNN", preset="resnet20"),
            ),
            untried=(
                "larger images, where the ViT's attention grows with the square of the number of "
                "patches and Swin's with the number (`vitlens profile vit-micro swin-micro --sizes "
                "32,64,128`); a separate recipe for each; pretrained weights; tasks that need "
                "maps, such as segmentation"
            ),
            notes=(
                "About equal parameters: the ViT is `vit-mini` with dim 72, patch 4, fixed 2-D "
                "positions; the Swin is `swin-micro` with dim 22, patch 2, windows of 4x4 patches; "
                "the CNN is `resnet20`. The ViT and both Swins share a recipe, the CNN has another "
                "one with the same batch size.",
                "Without shift, patches of different windows meet only where patches are merged.",
            ),
            extra="fields",
        ),
        "window": Kind(
            "Size of the attention windows",
            variants=_window_variants(),
            untried=(
                "larger images, where large windows cost more, windows without shift, a separate "
                "depth or width for each window, and tasks that need maps"
            ),
            notes=(
                "`swin-micro` with dim 22 and patch 2: maps of 16 x 16, 8 x 8 and 4 x 4 patches. A "
                "window that is larger than its map is the whole map.",
                "A larger window has more position biases and more products of queries and keys; "
                "all else is equal.",
            ),
            extra="fields",
        ),
        "recipe": Kind(
            "Stability of training",
            variants=(
                Variant("base", "the recipe", shape=_SMALL),
                Variant("low-rate", "rate / 5", shape=_SMALL, recipe={"learning_rate": 8e-4}),
                Variant(
                    "no-warm-up",
                    "no warm-up",
                    shape=_SMALL,
                    recipe={"warmup": 0.0},
                ),
                Variant("no-clipping", "no clipping", shape=_SMALL, recipe={"clip": 0.0}),
                Variant(
                    "high-rate",
                    "rate x 5",
                    shape=_SMALL,
                    recipe={"learning_rate": _HIGH_RATE},
                ),
                Variant(
                    "high-rate-no-warm-up",
                    "rate x 5, no warm-up",
                    shape=_SMALL,
                    recipe={"learning_rate": _HIGH_RATE, "warmup": 0.0},
                    against=("base", "high-rate"),
                ),
                Variant(
                    "high-rate-no-clipping",
                    "rate x 5, no clipping",
                    shape=_SMALL,
                    recipe={"learning_rate": _HIGH_RATE, "clip": 0.0},
                    against=("base", "high-rate"),
                ),
                Variant(
                    "adamw",
                    "AdamW",
                    shape=_SMALL,
                    recipe={"optimiser": "adamw", "learning_rate": 1e-3},
                ),
            ),
            untried=(
                "other schedules, batch sizes and depths, post-norm, and a search of the rate for "
                "each change"
            ),
            notes=(
                _BASE,
                "Each variant changes the recipe of `vit-mini` for digits-clear: Muon, rate 4e-3, "
                "5 % of the steps as warm-up, gradients clipped to a norm of 1.",
                "A training has failed if its loss became infinite, or if it classifies no better "
                "than guessing (one-sided binomial test, 5 %). An infinite loss counts as guessing "
                "the first class.",
            ),
            about_failures=True,
        ),
        "distillation": Kind(
            "A CNN as the teacher of a ViT",
            variants=(
                Variant(
                    "teacher", "CNN, few images", preset="resnet20", share=_FEW, candidate=False
                ),
                Variant(
                    "alone",
                    "ViT, few images",
                    shape=_SMALL,
                    share=_FEW,
                    against=("teacher",),
                ),
                Variant(
                    "taught",
                    "ViT with teacher, few images",
                    shape=_SMALL,
                    share=_FEW,
                    teacher="teacher",
                    base="alone",
                    against=("alone",),
                ),
                Variant(
                    "unlabelled",
                    "ViT with teacher, all images",
                    shape=_SMALL,
                    share=1.0,
                    teacher="teacher",
                    labels=False,
                    against=("alone", "taught"),
                ),
                Variant(
                    "all-labels",
                    "ViT, all images and labels",
                    shape=_SMALL,
                    share=1.0,
                    against=("unlabelled",),
                    candidate=False,
                ),
            ),
            untried=(
                "other teachers, hard labels, a distillation token, other temperatures and weights "
                "of the teacher's loss, and larger models"
            ),
            notes=(
                "The student is `vit-mini` at half its width (dim 64, depth 4, 4 heads, patch 4) "
                "with fixed 2-D positions; the teacher is `resnet20`.",
                "Only a tenth of the images has labels for the teacher and for both students of "
                "few images. It is repeated, so that all variants have equal steps. All images are "
                "fixed.",
                "The taught student of few images learns from their labels and from the "
                "teacher's probabilities, half and half, on the same views. That of all images "
                "learns only from the teacher's probabilities: nine tenths of its images have no "
                "labels.",
            ),
        ),
        "transfer": Kind(
            "A trained model adapted to other data",
            variants=(
                Variant("scratch", "from scratch", preset="", line="from scratch"),
                Variant(
                    "frozen", "frozen", preset="", start="pretrained", trained="head", line="frozen"
                ),
                Variant(
                    "last-blocks", "last blocks", preset="", start="pretrained", trained="last"
                ),
                Variant(
                    "full",
                    "full",
                    preset="",
                    start="pretrained",
                    line="full",
                    against=("scratch", "frozen", "last-blocks"),
                ),
                Variant("distilled", "distilled", preset="", teacher="full"),
                *_adapted_with_fewer_images(),
            ),
            untried=(
                "more images, other models and teachers, other augmentation than mirroring, "
                "another number of last blocks, and test images from another source"
            ),
            notes=(
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
            variants=(
                Variant("random", "random weights", shape=_HALF, trained="none"),
                Variant("supervised", "supervised", shape=_HALF, against=("random",)),
                Variant("mae", "MAE", shape=_HALF, objective="mae", against=_WITH_AND_WITHOUT),
                Variant("dino", "DINO", shape=_HALF, objective="dino", against=_WITH_AND_WITHOUT),
                Variant("clip", "CLIP", shape=_HALF, objective="clip", against=_WITH_AND_WITHOUT),
            ),
            untried=(
                "larger models and images, a thousand times more images as in the "
                "papers, a separate budget for each objective, photographs, and "
                "fine-tuning of all weights (where MAE is best in its paper, He 2022)"
            ),
            notes=(
                f"{_HALF_BASE} Accuracy is that of a linear probe on frozen features of all "
                "training images: the same measure for all variants, with or without a classifier.",
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
