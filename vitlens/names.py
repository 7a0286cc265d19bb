"""Names outside the registries, without torch: choices of options, ImageNet's 1000 classes.

`imagenet.txt` has one class per line, its wnid and WordNet's first lemma. Lines are in the order of
wnids, so the number of a line is the index of the class. The two cranes and the second maillot are
disambiguated by hand.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

PRESETS: Final = (
    "vit-micro",
    "vit-mini",
    "vit-tiny",
    "vit-tiny-224",
    "vit-small-224",
    "vit-base-224",
    "resnet20",
    "resnet18",
    "resnet50",
    "swin-micro",
    "swin-tiny-224",
)
DIGITS_PAIR: Final = ("vit-digits", "cnn-digits")
# trained on digits-shortcut, where the background's hue agrees with the class
SHORTCUT_PAIR: Final = ("vit-shortcut", "cnn-shortcut")
BUNDLED: Final = (*DIGITS_PAIR, *SHORTCUT_PAIR)
TEMPLATE_SETS: Final = ("photo", "simple", "openai")
OPTIMISERS: Final = ("adamw", "muon")

Fusion = Literal["mean", "max", "min"]
Substrate = Literal["blur", "mean", "black", "absent"]
Readout = Literal["cls", "cls+distillation", "mean", "pool"]
# features of an image: its CLS token, the mean of its patches, or both
FeaturePool = Literal["cls", "mean", "cls+mean"]
Pooling = Literal["cls", "mean"]  # the classifier's input: a CLS token, the mean of the patches
Weighting = Literal["dino", "majority"]  # of the neighbours' votes in k-NN
Projection = Literal["tsne", "pca"]
Objective = Literal["supervised", "self-supervised", "language-image"]  # of a pretraining
KnownObjective = Literal[Objective, "random weights", "not known"]
Replacement = Literal["mean", "zero", "resample"]
Refining = Literal["none", "affinity"]  # of a map of patches: by attention between them
Upsampling = Literal["none", "image"]  # of a map: along the image's edges
UnitKind = Literal["head", "mlp", "block", "latent"]
DistillKind = Literal["soft", "hard"]
Precision = Literal["auto", "fp32", "bf16"]
AutoencoderKind = Literal["topk", "batch-topk"]
RecipeName = Literal["course", "short", "deit"]
Compile = Literal["auto", "on", "off"]
Part = Literal["train", "test"]
FigureFormat = Literal["png", "svg", "pdf"]
FigureWidth = Literal["page", "column"]
TrackerName = Literal["tensorboard", "wandb"]
SelfChecks = Literal["all", "few"]  # of attacks
SequenceTask = Literal["reverse", "copy", "sort"]
SequencePositions = Literal["none", "fixed", "learned"]
SequenceView = Literal["vectors and positions", "positions", "vectors"]  # queries and keys
StepName = Literal[
    "embedding",
    "positions",
    "norm",
    "queries",
    "scores",
    "softmax",
    "values",
    "projection",
    "residual",
]

SEQUENCE_TASKS: Final[tuple[SequenceTask, ...]] = get_args(SequenceTask)
SEQUENCE_POSITIONS: Final[tuple[SequencePositions, ...]] = get_args(SequencePositions)
READOUTS: Final[tuple[Readout, ...]] = get_args(Readout)
AUTOENCODERS: Final[tuple[AutoencoderKind, ...]] = get_args(AutoencoderKind)
SUBSTRATES: Final[tuple[Substrate, ...]] = get_args(Substrate)
FUSIONS: Final[tuple[Fusion, ...]] = get_args(Fusion)
FEATURE_POOLS: Final[tuple[FeaturePool, ...]] = get_args(FeaturePool)
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)
WEIGHTINGS: Final[tuple[Weighting, ...]] = get_args(Weighting)
PROJECTIONS: Final[tuple[Projection, ...]] = get_args(Projection)
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
REFINEMENTS: Final[tuple[Refining, ...]] = get_args(Refining)
UPSAMPLINGS: Final[tuple[Upsampling, ...]] = get_args(Upsampling)
REPLACEMENTS: Final[tuple[Replacement, ...]] = get_args(Replacement)
UNIT_KINDS: Final[tuple[UnitKind, ...]] = ("head", "mlp", "block")  # of every model
DISTILL_KINDS: Final[tuple[DistillKind, ...]] = get_args(DistillKind)
RECIPE_NAMES: Final[tuple[str, ...]] = get_args(RecipeName)
COMPILES: Final[tuple[str, ...]] = get_args(Compile)
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)
FORMATS: Final[tuple[str, ...]] = get_args(FigureFormat)
TRACKERS: Final[tuple[TrackerName, ...]] = get_args(TrackerName)

DEFAULT_SEED: Final = 0
LABELS: Final = " labels"  # after a part: the fingerprint of its labels, not of its images
PERPLEXITY: Final = 30.0  # of t-SNE
_SEPARATORS: Final = re.compile(r"[\s_-]+")  # in the names of classes
_MOST_DIGITS: Final = 9  # a longer number is no class index
FEWEST_FOR_MEAN: Final = 8  # the mean over fewer images is too close to the output of each image


@cache
def _imagenet_names() -> Mapping[str, str]:
    """Return the short names by wnid."""
    text = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8")
    return dict(line.split(" ", 1) for line in text.splitlines())


def imagenet_classes() -> tuple[str, ...]:
    """Return the 1000 short names in the order of ImageNet-1k's logits."""
    return tuple(_imagenet_names().values())


def imagenet_indices() -> Mapping[str, int]:
    """Return the class index of each of the 1000 wnids ("n01440764" is 0)."""
    return {wnid: index for index, wnid in enumerate(_imagenet_names())}


def are_imagenet(names: Iterable[str]) -> bool:
    """Return True if these names, at least one, are all wnids of ImageNet-1k."""
    return set() < set(names) <= _imagenet_names().keys()


def plain_name(name: str) -> str:
    """Return a class name with one spelling for case, separators, leading zeros and accents."""
    text = unicodedata.normalize("NFC", name).casefold()
    plain = " ".join(_SEPARATORS.sub(" ", text).split())
    return str(int(plain)) if is_index(plain) else plain


def is_index(text: str) -> bool:
    """Return True for a whole number of ASCII digits, not longer than a class index can be."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def fingerprinted(name: str) -> str:
    """Return the subject of a fingerprint of this name: "test images", "test labels"."""
    return name if name.endswith(LABELS) else f"{name} images"
