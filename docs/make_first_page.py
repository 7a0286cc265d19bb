"""Make docs/images/first_page.png, the first page of the README's first command: the picture in the
README.

    python docs/make_first_page.py

Photographs reports/study-shortcut/report.html in the Chromium that is installed (`pip install -e
'.[browser]'`).
"""

import io
import shutil
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).parents[1]
WIDTH: Final = 1000  # CSS px: the contents are folded above the text
COLOURS: Final = 128


def main() -> None:
    """Photograph what stands before the first section."""
    with sync_playwright() as drivers:
        browser = drivers.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 1200}, device_scale_factor=1.25)
        page.goto((ROOT / "reports/study-shortcut/report.html").as_uri())
        page.add_style_tag(content="nav, .skip { display: none }")
        first, last = (page.locator(place).bounding_box() for place in ("header", "#answer"))
        assert first is not None
        assert last is not None
        clip = {
            "x": 0,
            "y": first["y"],
            "width": WIDTH,
            "height": last["y"] + last["height"] - first["y"],
        }
        pixels = page.screenshot(clip=clip, full_page=True)  # type: ignore[arg-type]
        browser.close()
    with Image.open(io.BytesIO(pixels)) as picture:
        light = picture.convert("RGB").quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE)
        light.save(ROOT / "docs/images/first_page.png", optimize=True)


if __name__ == "__main__":
    main()
