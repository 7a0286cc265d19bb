"""Images with their nearest neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import PHOTOGRAPHS, Margins, board, without_frames
from vitlens.figures.inputs import as_array, as_images, require_length
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import RIGHT, RIGHT_SYMBOL, SMALL, WIDE, WRONG, WRONG_SYMBOL, shortened, styled


@dataclass(frozen=True)
class RetrievedImages:
    """One query: image (3, height, width), name; its neighbours (k, 3, height, width), nearest first, their names and
    cosine similarity (k,); same: whether each is of the query's class, or None where a class is not known."""

    image: ArrayLike
    name: str
    neighbours: ArrayLike
    names: Sequence[str]
    similarity: ArrayLike
    same: Sequence[bool] | None = None


@styled
def retrieval_sheet(*, queries: Sequence[RetrievedImages], title: str) -> Figure:
    """Queries, each followed by its nearest neighbours; frame and symbol show whether these are of its class.

    Raises InputError for no query, and where numbers of neighbours differ.
    """
    if not queries:
        raise InputError("expected at least one query, found none")
    rows = [(as_images(_batch(query.image)), as_images(query.neighbours)) for query in queries]
    count = len(rows[0][1])
    ratio = rows[0][0].shape[2] / rows[0][0].shape[3]
    total = len(queries) * (1 + count)
    panel = min((WIDE - 0.3) / (1 + count) - 0.08, (PHOTOGRAPHS / (total * ratio)) ** 0.5, 1.3)
    letters = max(5, int(panel / 0.066))
    drawn = board(
        title=title,
        count=total,
        across=1 + count,
        panel=(panel, panel * ratio),
        gap=(0.08, 0.42),
        margins=Margins(top=0.2, bottom=0.4, left=0.1, right=0.1),
    )
    without_frames(drawn.panels)
    for index, (retrieved, (image, neighbours)) in enumerate(zip(queries, rows, strict=True)):
        similarity = as_array(retrieved.similarity, name="similarity", axes=("neighbours",))
        for name, values in (("images", neighbours), ("similarities", similarity), ("names", retrieved.names)):
            require_length(len(values), count, name=name, of="the neighbours")
        cells = drawn.panels[index * (1 + count) : (index + 1) * (1 + count)]
        cells[0].imshow(enlarged(image[0]))
        cells[0].set_xlabel(shortened(retrieved.name, letters), fontsize=SMALL, labelpad=2)
        for place, axes in enumerate(cells[1:]):
            axes.imshow(enlarged(neighbours[place]))
            word, colour = shortened(retrieved.names[place], letters), "black"
            if retrieved.same is not None:
                colour = RIGHT if retrieved.same[place] else WRONG
                symbol = RIGHT_SYMBOL if retrieved.same[place] else WRONG_SYMBOL
                word = f"{symbol} {shortened(retrieved.names[place], letters - 2)}"
                axes.spines[:].set(visible=True, color=colour, linewidth=1.6)
            axes.set_xlabel(f"{word}\n{similarity[place]:.3f}", fontsize=SMALL, color=colour, labelpad=2)
    for place, axes in enumerate(drawn.panels[: 1 + count]):
        axes.set_title("query" if place == 0 else str(place), fontsize=SMALL)
    return drawn.figure


def _batch(image: ArrayLike) -> ArrayLike:
    return as_array(image, name="image", axes=("3", "height", "width"))[None]
