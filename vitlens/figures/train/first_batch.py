"""The first training batch: images as given, and below each what the model is trained on, with its targets."""

from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.board import PHOTOGRAPHS, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import GREY, SMALL, TALL, WIDE, shortened, styled

_ACROSS: Final = 6
_LEFT: Final = 0.28  # inch, for the rows' names
_LINE: Final = 0.13  # inch
_LETTER: Final = 0.065  # inch per letter of a caption
_LEAST: Final = 0.005  # share of a class that is named


@styled
def first_batch(
    *,
    given: ArrayLike,
    trained: ArrayLike,
    labels: ArrayLike,
    targets: ArrayLike,
    classes: Sequence[str],
    title: str = "The first training batch",
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1] as given, and below each the one that the model is trained on.

    labels: class indices of the given images (batch,); targets: shares of the classes (batch, classes), drawn as
    "cat: 0.62, dog: 0.38". Raises InputError where shapes do not fit.
    """
    before, after = as_images(given, name="given"), as_images(trained, name="trained")
    own = as_array(labels, name="labels", axes=("batch",)).astype(int)
    shares = as_array(targets, name="targets", axes=("batch", "classes"))
    for name, count in (("trained", len(after)), ("labels", len(own)), ("targets", len(shares))):
        require_length(count, len(before), name=name, of="the given images")
    require_length(shares.shape[1], len(classes), name="shares", of="the classes")
    across, ratio = min(_ACROSS, len(before)), before.shape[2] / before.shape[3]
    groups = -(-len(before) // across)
    below = 2 * _LINE + 0.08  # two classes of a mixed image
    room = min((TALL - 0.6) / (2 * groups) - below, (PHOTOGRAPHS / (2 * groups * across)) ** 0.5)
    width = min((WIDE - _LEFT - 0.1) / across - 0.07, room / ratio, 1.2)
    drawn = board(
        title=title,
        count=2 * groups * across,
        across=across,
        panel=(width, width * ratio),
        gap=(0.07, below),
        margins=Margins(left=_LEFT, bottom=below),
    )
    letters = max(6, int(width / _LETTER))
    without_frames(drawn.panels)
    for index in range(groups * across):
        row, column = divmod(index, across)
        pair = [drawn.panels[(2 * row + lower) * across + column] for lower in (0, 1)]
        if index >= len(before):
            for axes in pair:
                axes.set_visible(False)
            continue
        captions = shortened(classes[own[index]], letters), _target(shares[index], classes, letters)
        for axes, picture, caption, colour in zip(pair, (before[index], after[index]), captions, (GREY, "black")):
            axes.imshow(enlarged(picture))
            axes.set_xlabel(caption, fontsize=SMALL, labelpad=2, color=colour)
    for index, axes in enumerate(drawn.panels[::across]):
        axes.set_ylabel("trained on" if index % 2 else "as given", fontsize=SMALL)
    return drawn.figure


def _target(shares: Array, classes: Sequence[str], letters: int) -> str:
    """The classes of a target with their shares, one a line; of one class its name alone."""
    present = [index for index in shares.argsort()[::-1] if shares[index] >= _LEAST]
    if len(present) == 1:
        return shortened(classes[present[0]], letters)
    return "\n".join(f"{shortened(classes[index], max(3, letters - 6))}: {shares[index]:.2f}" for index in present[:2])
