"""Two models on the same labelled images: their answers side by side."""

from collections.abc import Callable

from vitlens.analysis.errors import Comparison, compare_answers
from vitlens.analysis.evaluate import Evaluation, answers, require_labels
from vitlens.analysis.reading import require_shared
from vitlens.data.split import Split, takes_splits
from vitlens.errors import InputError
from vitlens.models.specimen import Specimen
from vitlens.models.support import NEEDS, require


@takes_splits
def compare(
    first: Specimen,
    second: Specimen,
    split: Split,
    *,
    second_split: Split | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Comparison:
    """Who is right where: the answers of two models to the same labelled images, each image in one cell of errors.

    second_split: the same images in the same order as the second model takes them (None: as the first does). Classes
    are matched by name. Raises DataError without labels, InputError when a model does not know the data's classes.

    >>> import vitlens
    >>> from vitlens.data.digits import digits
    >>> vit, cnn = vitlens.load("vit-digits"), vitlens.load("cnn-digits")
    >>> found = vitlens.compare(vit, cnn, digits("test").limit(20))
    >>> sum(found.counts.values())
    20
    """
    one, two = evaluations(
        (first, second),
        (split, second_split or split),
        batch_size=batch_size,
        precision=precision,
        advance=advance,
    )
    return compare_answers(one, two)


def evaluations(
    specimens: tuple[Specimen, Specimen],
    splits: tuple[Split, Split],
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Evaluation, Evaluation]:
    """What both specimens answer, in the data's classes; errors as `compare`."""
    for specimen in specimens:
        require(specimen, *NEEDS["compare"])
    if len(splits[0]) != len(splits[1]) or splits[0].classes != splits[1].classes:
        raise InputError(f"expected the same images for both models, found {len(splits[0])} and {len(splits[1])}")
    for specimen in specimens:
        specimen.require_classifier()
    readings = require_shared(specimens[0].classes, specimens[1].classes, splits[0].classes)
    found = []
    for specimen, split, read in zip(specimens, splits, readings):
        labels = require_labels(split).cpu().long()
        logits = answers(specimen, split, batch_size=batch_size, precision=precision, advance=advance)
        found.append(Evaluation(specimen.alias, read.classes, read.read(logits), labels, split.groups))
    return found[0], found[1]
