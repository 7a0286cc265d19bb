"""The page, served by the command in a separate process; skipped without the extra."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ui.browser.conftest import browser

__all__ = ["browser"]


@dataclass(frozen=True)
class Served:
    """A page that is served. files: where its process keeps temporary files."""

    address: str
    files: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if find_spec("gradio") is None:
        pytest.skip("needs gradio: pip install 'vitlens[demo]'")
    folder = tmp_path_factory.mktemp("served")
    line = [sys.executable, "-m", "vitlens", "demo", "vit-digits", "cnn-digits", "--no-browser"]
    # in tests, a session's memory is given back a second after its tab is closed
    environment = {**os.environ, "TMPDIR": str(folder), "GRADIO_IS_E2E_TEST": "1"}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), (
            f"expected the address of the page, found {address!r}"
        )
        try:
            yield Served(address, folder)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    left = [path for path in folder.rglob("*") if path.is_file() and "vitlens-demo" in str(path)]
    assert left == [], "files are left behind"


class Visitor:
    """One visitor of the page, with separate cookies and state; requests elsewhere are recorded."""

    def __init__(self, browser: Any, address: str, **settings: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 1000}, **settings}
        )
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(20_000)
        self.problems: list[str] = []
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        allowed = (address, "data:", "blob:", "about:")
        self.tab.on(
            "request",
            lambda request: request.url.startswith(allowed) or self.problems.append(request.url),
        )
        self.tab.goto(address)
        self.shows("look", "predicts")

    def open(self, name: str) -> None:
        self.tab.get_by_role("tab", name=name, exact=True).first.click()

    def wait(self, selector: str, text: str) -> str:
        """Return the words of an element once they hold this text."""
        element = self.tab.locator(selector)
        element.filter(has_text=text).wait_for()
        return str(element.inner_text())

    def report(self, name: str) -> Any:
        """Return the body of the report that a tab shows, in its frame."""
        return self.tab.frame_locator(f'[id="{name}-result"] iframe').locator("body")

    def shows(self, name: str, text: str) -> str:
        """Return the words of the report that a tab shows, once they hold this text."""
        body = self.report(name)
        body.filter(has_text=text).wait_for()
        return str(body.inner_text())

    def upload(self, path: Path) -> None:
        self.tab.locator("#upload input[type=file]").set_input_files(str(path))

    def choose(self, name: str, option: str) -> None:
        """Choose in a dropdown."""
        self.tab.locator(f"#{name} input").click()
        self.tab.get_by_role("option", name=option, exact=True).click()


@pytest.fixture
def visitor(browser: Any, served: Served) -> Iterator[Visitor]:
    one = Visitor(browser, served.address)
    yield one
    assert one.problems == []
    one.context.close()
