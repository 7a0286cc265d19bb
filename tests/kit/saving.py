"""What tests save of a report's figures: every figure is made, few are laid out and encoded.

Matplotlib's layout and encoding of hundreds of reports' figures is a fifth of the tests' time. Tests of what a report
says or measures need the figures made, for which vitlens's own code runs, and a file where each would be; that they can
be saved is tested for every command by tests/kit/whole_folder.py, and what they show in tests/kernels/charts.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COARSE: Final = 50  # dots per inch


def save_little() -> None:
    """From now on, a report's PNG is one pixel, unless `saved_figures` is entered; other formats are saved.

    Nor does anything wait until it is on the disk, thousands of times 5 ms.
    """
    from vitlens.commands.run import publish
    from vitlens.files import write_atomically

    os.fsync = lambda _: None  # no test reads a folder after the machine has lost its power

    whole = publish._save

    def save(figure: "Figure", files: Mapping[str, Path]) -> None:
        if _WHOLE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(publish, "_DOTS_PER_INCH", _WHOLE[-1])
                whole(figure, files)
            return
        whole(figure, {form: path for form, path in files.items() if form != "png"})
        with write_atomically(files["png"]) as temporary:
            temporary.write_bytes(_pixel())

    publish._save = save


_WHOLE: list[int] = []


@contextmanager
def saved_figures(dots: int = _COARSE) -> Iterator[None]:
    """Inside, figures are saved whole, with so many dots per inch."""
    _WHOLE.append(dots)
    try:
        yield
    finally:
        _WHOLE.pop()


@cache
def _pixel() -> bytes:
    from PIL import Image

    written = BytesIO()
    Image.new("RGB", (1, 1)).save(written, format="PNG")
    return written.getvalue()
