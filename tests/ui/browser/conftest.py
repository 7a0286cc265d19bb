"""One headless Chromium for all tests of this folder; skipped, with the reason, without one."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.pages import document, written

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install 'vitlens[browser]'"
    )
    with playwright.sync_playwright() as driver:
        bundled = driver.chromium.executable_path
        executable = next(
            (path for path in map(shutil.which, _NAMES) if path),
            bundled if Path(bundled).is_file() else None,
        )
        if executable is None:
            pytest.skip("needs Chromium: on the PATH, or playwright install chromium")
        opened = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with every part of a document."""
    folder = tmp_path_factory.mktemp("page")
    file = folder / "report.html"
    file.write_text(written(folder, document()), encoding="utf-8")
    return file


class Opened:
    """A page in a separate tab, with the messages of its console and its requests."""

    def __init__(self, browser: Any, file: Path, **settings: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **settings}
        )
        self.tab = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(file.as_uri())
        self.address = file.as_uri()
        if settings.get("java_script_enabled", True):
            self.tab.wait_for_selector("[data-ready=true]")

    def words(self) -> str:
        """Return the explorer's words about the map that is shown, once it is drawn."""
        self.tab.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return str(self.tab.locator(".ex-said").inner_text())

    def point(self, row: float, column: float, grid: tuple[int, int] = (4, 5)) -> None:
        """Point at the middle of a patch."""
        box = self.tab.locator(".ex-stage").bounding_box()
        place = {
            "x": (column + 0.5) * box["width"] / grid[1],
            "y": (row + 0.5) * box["height"] / grid[0],
        }
        self.tab.locator(".ex-stage").hover(position=place)

    def close(self) -> None:
        """Fail for a line of the console, and for requests except to the file and its data."""
        outside = [
            url
            for url in self.asked
            if url != self.address and not url.startswith(("data:", "blob:"))
        ]
        assert self.said + outside == []
        self.context.close()


@pytest.fixture
def opened(browser: Any, whole_page: Path) -> Iterator[Opened]:
    page = Opened(browser, whole_page)
    yield page
    page.close()


@pytest.fixture
def of(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open the page of a text."""
    pages: list[Opened] = []

    def open_(text: str, **settings: Any) -> Opened:
        (tmp_path / "page.html").write_text(text, "utf-8")
        pages.append(Opened(browser, tmp_path / "page.html", **settings))
        return pages[-1]

    yield open_
    for page in pages:
        page.close()


def radio(page: Opened, name: str) -> Any:
    """Return the radio button of this name."""
    return page.tab.get_by_role("radio", name=name, exact=True)
