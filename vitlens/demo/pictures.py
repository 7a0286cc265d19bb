"""A visitor's picture: an upload or an example, as each model of the page sees it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlens.commands.run.options import RunOptions
from vitlens.data.catalogue import load_data
from vitlens.data.decode import Decoded, Header, UnreadableError, decode_file, decode_image, flatten, open_image
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.folder import list_images
from vitlens.data.reading import probe
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.report.html.pictures import Embedded, photograph
from vitlens.shapes import Images, Pixels

UPLOAD_BYTES: Final = 20_000_000  # of one file
EXAMPLES: Final = 24
_SHOWN: Final = 448  # px, the longer side of a thumbnail
_DIGITS: Final = 6  # example scenes
_PHOTOGRAPHS: Final = {"china.jpg": "daniel.buechele, CC BY 2.0", "flower.jpg": "dany13, CC BY 2.0"}


@dataclass(frozen=True, eq=False)  # pixels are not compared
class Picture:
    """One picture. key: of no other picture; name: of its file; note: what was done to it, "" where nothing was;
    pixels: (1, 3, height, width) uint8, by the alias of the model that they were resized for."""

    key: str
    name: str
    note: str
    pixels: Mapping[str, Pixels]

    def images(self, model: Model) -> Images:
        """The picture as a batch of one in [0, 1], for this model."""
        return self.pixels[model.alias].to(model.device).float() / 255

    def array(self, model: Model) -> NDArray[np.float64]:
        """The picture as this model sees it, (3, height, width) in [0, 1]."""
        return np.asarray(self.pixels[model.alias][0].numpy() / 255, dtype=np.float64)

    def split(self, model: Model) -> Split:
        """The picture as the only image of a split, for the commands' reports."""
        pixels = self.pixels[model.alias]
        size = int(pixels.shape[2]), int(pixels.shape[3])
        notes = (self.note,) if self.note else ()
        return Split("images", "test", InMemory(pixels), size, (), files=(self.name,), title="images", notes=notes)


@dataclass(frozen=True)
class Example:
    """An example: its name, and what is shown of it and read from it."""

    name: str
    image: Image.Image

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """(height, width, 3)."""
        return np.asarray(self.image.convert("RGB"))


def embedded(pixels: NDArray[np.floating[Any]]) -> Embedded:
    """Pixels (height, width, 3) in [0, 1] inside the page."""
    return photograph(np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8))


def read_upload(path: Path, models: Sequence[Model]) -> Picture:
    """The picture of an uploaded file, which is deleted, whatever comes of it; called inside `quiet_pillow`.

    Raises DataError, in one line, for a file that is too large or no image.
    """
    try:
        size = path.stat().st_size
        require_size(size)
        try:
            decoded = _by_preprocessing(models, lambda model: decode_file(path, model.preprocessing))
        except UnreadableError as reason:
            raise DataError(f"cannot read {path.name}: {reason}") from reason
    finally:
        path.unlink(missing_ok=True)
    note = next(iter(decoded.values())).header.note or ""
    return Picture(uuid4().hex, path.name, note, {alias: each.pixels[None] for alias, each in decoded.items()})


def require_size(size: int) -> None:
    """Raise DataError for a file of more bytes than one may upload."""
    if size > UPLOAD_BYTES:
        raise DataError(
            f"expected a file of at most {UPLOAD_BYTES // 1_000_000} MB, found {size / 1e6:.1f} MB; save the picture "
            "smaller, or as JPEG"
        )


def of_example(example: Example, models: Sequence[Model]) -> Picture:
    """The picture of an example."""
    header = Header((example.image.height, example.image.width), None)
    decoded = _by_preprocessing(models, lambda model: Decoded(decode_image(example.image, model.preprocessing), header))
    return Picture(uuid4().hex, example.name, "", {alias: each.pixels[None] for alias, each in decoded.items()})


def examples(given: Sequence[str], models: Sequence[Model], *, options: RunOptions) -> tuple[Example, ...]:
    """The images of --images, at most EXAMPLES; else scenes of digits and photographs, as the models know them.

    Raises DataError for a path that does not exist, and where none of the files can be read.
    """
    if given:
        return _of_files([Path(path).expanduser() for path in given])
    found: list[Example] = []
    if any(model.classes == DIGITS for model in models):
        split = load_data("digits", part="test", seed=options.seed).limit(_DIGITS, seed=options.seed)
        assert split.labels is not None
        for number, (batch, label) in enumerate(zip(split.batches(1), split.labels.tolist())):
            pixels = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
            found.append(Example(f"scene {number} of a {label}", Image.fromarray(pixels)))
    if any(model.classes != DIGITS for model in models):
        found.extend(_photographs())
    return tuple(found)


def _photographs() -> list[Example]:
    """scikit-learn's two photographs."""
    from sklearn import datasets

    folder = Path(datasets.__file__).parent / "images"
    files = [(folder / name, credit) for name, credit in _PHOTOGRAPHS.items() if (folder / name).is_file()]
    return [Example(f"{path.name} ({credit})", _opened(path)) for path, credit in files]


def _of_files(paths: Sequence[Path]) -> tuple[Example, ...]:
    listed = list(list_images(paths).paths)[: 2 * EXAMPLES]
    tried = list(zip(listed, probe(listed)))
    readable = [path for path, header in tried if isinstance(header, Header)][:EXAMPLES]
    if not readable:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in tried[:3])
        raise DataError(f"expected at least one image for --images, found none: {reasons}")
    return tuple(Example(path.name, _opened(path)) for path in readable)


def _opened(path: Path) -> Image.Image:
    """A file in RGB, no larger than a page shows twice over; rotated as its camera says."""
    with open_image(path) as image:
        whole = flatten(image)
        whole.thumbnail((3 * _SHOWN, 3 * _SHOWN))
        return whole.copy()


def _by_preprocessing(models: Sequence[Model], decode: Callable[[Model], Decoded]) -> dict[str, Decoded]:
    """The picture for each model by alias, decoded once for those that take it alike."""
    known: dict[tuple[object, ...], Decoded] = {}
    found = {}
    for model in models:
        wanted = model.preprocessing
        key = (wanted.size, wanted.resize, wanted.interpolation)
        if key not in known:
            known[key] = decode(model)
        found[model.alias] = known[key]
    return found
