"""A visitor's picture: an upload or an example, as each model of the page sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlens.data.catalogue import load_data
from vitlens.data.decode import UnreadableError, decode
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.folder import list_images
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.report.html.pictures import MOST, Embedded, photograph
from vitlens.shapes import Images, Pixels

UPLOAD_BYTES: Final = 20_000_000  # of one file
EXAMPLES: Final = 24  # the largest number of examples
_DIGITS: Final = 6  # example scenes
_MOST_LISTED: Final = 3  # reasons in a message
# photographs that come with scikit-learn, with their credits
_PHOTOGRAPHS: Final = {"china.jpg": "daniel.buechele, CC BY 2.0", "flower.jpg": "dany13, CC BY 2.0"}


@dataclass(frozen=True, eq=False)  # pixels are not compared
class Picture:
    """One picture.

    key: a random name, which tells pictures of one file name apart.
    name: the name of its file.
    note: on its decoding, or "".
    pixels: (1, 3, height, width) uint8, by the alias of the model for which they were resized.
    """

    key: str
    name: str
    note: str
    pixels: Mapping[str, Pixels]

    def images(self, model: Model) -> Images:
        """Return the picture as a batch of one in [0, 1], for this model."""
        return self.pixels[model.alias].to(model.device).float() / 255

    def array(self, model: Model) -> NDArray[np.float64]:
        """Return the picture as this model sees it, (3, height, width) in [0, 1]."""
        return np.asarray(self.pixels[model.alias][0].numpy() / 255, dtype=np.float64)

    def split(self, model: Model) -> Split:
        """Return the picture as the only image of a split, for the commands' reports."""
        pixels = self.pixels[model.alias]
        return Split(
            name="images",
            title="images",
            part="test",
            source=InMemory(pixels),
            size=(int(pixels.shape[2]), int(pixels.shape[3])),
            classes=(),
            files=(self.name,),
            notes=(self.note,) if self.note else (),
        )


def embedded(pixels: NDArray[np.floating[Any]], *, most: int = MOST) -> Embedded:
    """Return a picture for the page.

    pixels: (height, width, 3) in [0, 1].
    most: the largest side in px; larger pictures are made smaller.
    """
    bytes_of_pixels = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return photograph(bytes_of_pixels, most=most)


def read_upload(path: Path, models: Sequence[Model]) -> Picture:
    """Return the picture of an uploaded file, which is always deleted; call inside `quiet_pillow`.

    Raises DataError, in one line, for a file that is too large or no image.
    """
    try:
        require_size(path.stat().st_size)
        return _decode_picture(path, models, path.name)
    except UnreadableError as reason:
        raise DataError(f"cannot read {path.name}: {reason}") from reason
    finally:
        path.unlink(missing_ok=True)


def require_size(size: int) -> None:
    """Raise DataError for a file of more than UPLOAD_BYTES."""
    if size > UPLOAD_BYTES:
        raise DataError(
            f"expected a file of at most {UPLOAD_BYTES // 1_000_000} MB, found {size / 1e6:.1f} "
            "MB; save the picture smaller, or as JPEG"
        )


def _decode_picture(image: Path | Image.Image, models: Sequence[Model], name: str) -> Picture:
    """Return a picture decoded for each model. Raises UnreadableError."""
    pixels_by_alias = {}
    notes = []
    for model in models:
        pixels, header = decode(image, model.preprocessing)
        pixels_by_alias[model.alias] = pixels[None]  # a batch of one
        notes.append(header.note or "")
    # notes are on the file, so they are the same for all models
    return Picture(uuid4().hex, name, notes[0], pixels_by_alias)


def examples(paths: Sequence[str], models: Sequence[Model]) -> tuple[Picture, ...]:
    """Return the images of --images, at most EXAMPLES; else scenes of digits and photographs.

    Scenes are for models of digits, photographs for others. Call it inside `quiet_pillow`. Raises
    DataError for a path that does not exist, and if none of the files can be read.
    """
    if paths:
        return _read_files([Path(path).expanduser() for path in paths], models)
    pictures: list[Picture] = []
    if any(model.classes == DIGITS for model in models):
        split = load_data("digits", part="test", limit=_DIGITS)
        assert split.labels is not None
        labels = split.labels.tolist()
        for number, batch in enumerate(split.batches(1)):
            # (3, height, width) in [0, 1] to bytes (height, width, 3), as PIL takes them
            pixels = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
            name = f"scene {number} of a {labels[number]}"
            pictures.append(_decode_picture(Image.fromarray(pixels), models, name))
    if any(model.classes != DIGITS for model in models):
        from sklearn import datasets

        folder = Path(datasets.__file__).parent / "images"
        for name, credit in _PHOTOGRAPHS.items():
            path = folder / name
            if path.is_file():
                pictures.append(_decode_picture(path, models, f"{name} ({credit})"))
    return tuple(pictures)


def _read_files(paths: Sequence[Path], models: Sequence[Model]) -> tuple[Picture, ...]:
    """Return the pictures of files and folders, without files that cannot be read."""
    pictures = []
    reasons = []
    # some files may be unreadable, but a large folder is not searched to its end
    for path in list_images(paths)[: 2 * EXAMPLES]:
        try:
            pictures.append(_decode_picture(path, models, path.name))
        except UnreadableError as reason:
            reasons.append(f"{path.name}: {reason}")
    if not pictures:
        raise DataError(
            "expected at least one image for --images, found none: "
            f"{'; '.join(reasons[:_MOST_LISTED])}"
        )
    return tuple(pictures[:EXAMPLES])
