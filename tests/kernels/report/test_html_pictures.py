"""Pictures in a page: small, whole, of the right size."""

from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlens.report.html.pictures import MOST, Embedded, figure, photograph


def opened(picture: Embedded) -> Image.Image:
    head, _, data = picture.uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(BytesIO(b64decode(data)))


def test_a_chart_is_kept_without_loss(tmp_path: Path):
    chart = Image.new("RGB", (400, 200), "white")
    chart.paste((0, 114, 178), (50, 60, 90, 200))
    chart.save(tmp_path / "chart.png", dpi=(100, 100))
    shown = figure(tmp_path / "chart.png")
    assert (shown.width, shown.height) == (422, 211)  # 4 inches at 96 px, enlarged by a tenth
    np.testing.assert_array_equal(np.asarray(opened(shown).convert("RGB")), np.asarray(chart))


def test_a_figure_has_few_more_pixels_than_are_shown_and_a_photograph_is_compressed(tmp_path: Path):
    Image.new("RGBA", (1440, 720), (0, 0, 0, 0)).save(tmp_path / "wide.png", dpi=(200, 200))
    shown = figure(tmp_path / "wide.png")
    assert (shown.width, opened(shown).size) == (760, (874, 437))
    assert not shown.is_chart  # only what says so is inverted on a dark page
    assert opened(shown).convert("RGB").getpixel((5, 5)) == (255, 255, 255)  # what was transparent is white
    noise = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png", dpi=(200, 200))
    shown = figure(tmp_path / "noise.png")
    assert len(shown.uri) < (tmp_path / "noise.png").stat().st_size
    assert opened(shown).size == (182, 121)


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(1, 1, (1, 1)), (10_000, 100, (4, MOST)), (300, 200, (200, 300))],
)
def test_photographs_of_any_size(height, width, size):
    shown = photograph(np.full((height, width, 3), 200, np.uint8))
    assert (shown.width, shown.height) == size
    assert opened(shown).size == size
