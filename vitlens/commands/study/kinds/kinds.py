"""What a `vitlens study --kind` is: its variants, their differences, and what papers report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from vitlens.training.objectives.registry import CLASSIFY

Overrides: TypeAlias = Mapping[str, Any]  # of a preset's shape, as models.rebuild takes them
Part: TypeAlias = Literal["all", "last", "head", "none"]
Start: TypeAlias = Literal["random", "pretrained"]
Extra: TypeAlias = Literal["fields", "cut", "positions", "sinks", "inside", "pretraining"]

SEEDS: Final = 3
# Epochs without --epochs: minutes of one core for each training. On digits-clear most variants then
# gain one to five points in the last quarter, which the report says; on digits and digits-shortcut
# they are too few for a model's best accuracy.
EPOCHS: Final[Mapping[str, int]] = MappingProxyType(
    {"digits-clear": 8, "digits": 6, "digits-shortcut": 6}
)
OTHER_EPOCHS: Final = 20
# of a model that is adapted; its frozen variant has cached features and more epochs
ADAPTING_EPOCHS: Final = 10


@dataclass(frozen=True)
class Variant:
    """One model of a study, trained once for each seed.

    label: its name in folders and metrics.
    words: its name in figures and tables.
    preset: its architecture; "" is that of MODEL.
    shape: the differences from the preset's shape.
    start: its first weights.
    trained: the part that is trained.
    teacher: the label of the variant from whose outputs it learns; "" is none.
    labels: False if it learns only from its teacher.
    objective: of its training, see training/objectives.
    recipe: the differences from its preset's recipe.
    share: of the training images; a source that draws new ones every epoch then keeps its first.
        None is all images, drawn anew where the source draws them.
    repeated: True if a share is repeated to the length of the whole set, so that it has as many
        steps; False if it has as many epochs.
    line: its line in the chart over the number of images.
    against: the labels of the variants that it is compared with. () is the first; for a variant
        that cannot be chosen, () is none.
    base: the label of the variant from which it differs in one factor; they are compared, too.
    candidate: True if it may be chosen.
    """

    label: str
    words: str
    preset: str = "vit-mini"
    shape: Overrides = field(default_factory=dict)
    start: Start = "random"
    trained: Part = "all"
    teacher: str = ""
    labels: bool = True
    objective: str = CLASSIFY
    recipe: Overrides = field(default_factory=dict)
    share: float | None = None
    repeated: bool = True
    line: str = ""
    against: tuple[str, ...] = ()
    base: str = ""
    candidate: bool = True

    @property
    def is_trained(self) -> bool:
        """Return True if any of it is trained."""
        return self.trained != "none"


@dataclass(frozen=True)
class Finding:
    """A result of the literature that a study can repeat or contradict.

    label, against: the labels of two variants that the study compares.
    expects: "higher" if the first is reported to be more accurate, "equal" if no difference is
        reported.
    statement: the result, a sentence without a full stop.
    source: author and year.
    caveat: how the study differs from the paper, which may explain another result.
    """

    label: str
    against: str
    expects: Literal["higher", "equal"]
    statement: str
    source: str
    caveat: str


@dataclass(frozen=True)
class Kind:
    """A kind of study.

    title: of its report.
    variants: in order, see `Variant.against`.
    untried: what it does not vary, for a sentence that begins with "Not tried:".
    notes: on its design. The first is the opening of the section on the recipes.
    extra: measured in addition to accuracy: receptive fields ("fields"), an image cut into patches
        ("cut"), the order of position embeddings ("positions"), sinks and high-norm patches
        ("sinks"), changes inside a model that is adapted ("inside"), or features ("pretraining").
    about_failures: True if the study is about the share of trainings that fail.
    data, epochs: the defaults (epochs None: by the data).
    """

    title: str
    variants: tuple[Variant, ...]
    untried: str
    notes: tuple[str, ...] = ()
    extra: Extra | None = None
    about_failures: bool = False
    data: str = "digits-clear"
    epochs: int | None = None

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Return the labels of each variant that changes another in one factor, and of that
        other one.
        """
        return tuple((variant.label, variant.base) for variant in self.variants if variant.base)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the labels of each variant and of one that it is compared with."""
        first, *later = self.variants
        pairs = []
        for variant in later:
            against = variant.against
            if not against and variant.candidate:
                against = (first.label,)
            for other in against:
                pairs.append((variant.label, other))
        return tuple(pairs)

    @property
    def adapts(self) -> bool:
        """Return True if its variants are forms of one trained MODEL."""
        return not self.variants[0].preset
