"""vitlens demo under visitors in Chromium: seconds from upload to the report and from a click to
the answer, and several visitors at a time for a minute.

    python benchmarks/demo.py [--users 8] [--seconds 60] MODEL...

Needs the extras demo and browser. Prints medians and largest values with n, and how many errors the
visitors saw.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

PATIENCE = 60.0  # seconds that a visitor waits for an answer
TABS = {
    name: f"[id='{result}-result'] iframe"
    for name, result in (
        ("Look", "look"),
        ("Explain", "right"),
        ("Break", "break"),
        ("Intervene", "intervene"),
    )
}


def photograph(folder: Path, number: int) -> Path:
    """Return a file that no visitor had before: smooth noise of 640x480."""
    noise = np.random.default_rng(number).integers(0, 255, (12, 16, 3), np.uint8)
    path = folder / f"visitor-{number}.jpg"
    Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC).save(path)
    return path


class Visitor:
    """One visitor; every action's seconds are kept by its name."""

    def __init__(self, tab, folder: Path, number: int, seconds: dict[str, list[float]]) -> None:
        self.tab = tab
        self.folder = folder
        self.number = number
        self.seconds = seconds
        self.uploads = 0
        self.tabs = dict(TABS)  # which tabs the model has, and what is seen in them
        self.errors: list[str] = []
        tab.set_default_timeout(1000 * PATIENCE)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))

    async def timed(self, name: str, wanted: str, act, **values: object) -> None:
        """Act, and wait until `wanted`, a condition in JavaScript, holds; an answer that does not
        come is an error.
        """
        from playwright.async_api import TimeoutError as NoAnswerError

        start = time.monotonic()
        try:
            await act
            await self.tab.wait_for_function(wanted, **values)
        except NoAnswerError:
            self.errors.append(f"{name}: no answer within {PATIENCE:.0f} s")
        self.seconds[name].append(time.monotonic() - start)
        toast = self.tab.locator(".toast-body")
        if await toast.count():
            self.errors.append(await toast.first.inner_text())

    async def upload(self) -> None:
        self.uploads += 1
        file = photograph(self.folder, 1000 * self.number + self.uploads)
        await self.open("Look")
        shown = await self.tab.evaluate("document.querySelector('#look-result iframe').srcdoc")
        await self.timed(
            "upload to report",
            "old => document.querySelector('#look-result iframe').srcdoc !== old",
            self.tab.locator("#upload input[type=file]").set_input_files(str(file)),
            arg=shown,
        )

    async def open(self, name: str) -> None:
        await self.timed(
            f"open {name}",
            "what => [...document.querySelectorAll(what)].some(e => e.offsetParent)",
            self.tab.get_by_role("tab", name=name, exact=True).first.click(),
            arg=self.tabs[name],
        )

    async def head(self) -> None:
        await self.open("Intervene")
        heads = self.tab.locator(".vl-head")
        shown = await self.tab.evaluate("document.querySelector('#intervene-result iframe').srcdoc")
        await self.timed(
            "head switched",
            "old => document.querySelector('#intervene-result iframe')?.srcdoc !== old",
            heads.nth(random.randrange(await heads.count())).click(),
            arg=shown,
        )

    async def act(self) -> None:
        """Anything that a visitor does."""
        kind = random.choice(
            ["upload", *(["head"] * 2 if "Intervene" in self.tabs else []), *self.tabs]
        )
        if kind == "upload":
            await self.upload()
        elif kind == "head":
            await self.head()
        else:
            await self.open(kind)


async def visit(browser, address: str, folder: Path, number: int, alias: str, seconds) -> Visitor:
    """Return a new visitor, who has chosen a model."""
    context = await browser.new_context(viewport={"width": 1200, "height": 900})
    visitor = Visitor(await context.new_page(), folder, number, seconds)
    await visitor.tab.goto(address)
    await visitor.tab.wait_for_selector("#look-result iframe")
    await visitor.tab.get_by_label(alias, exact=True).first.check()
    await visitor.tab.locator("#look-result [role=status]").filter(has_text=alias).wait_for()
    return visitor


async def measure(
    address: str, aliases: list[str], users: int, lasting: float, folder: Path
) -> int:
    """Return all measurements; the number of errors that visitors saw."""
    from playwright.async_api import async_playwright

    errors: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for number, alias in enumerate(aliases):
            seconds: dict[str, list[float]] = defaultdict(list)
            visitor = await visit(browser, address, folder, number, alias, seconds)
            for _ in range(10):
                await visitor.upload()
            if await intervenes(visitor):
                for _ in range(20):
                    await visitor.head()
            report(f"one visitor, {alias}", seconds)
            errors += visitor.errors
            await visitor.tab.context.close()
        seconds = defaultdict(list)
        visitors = [
            await visit(browser, address, folder, 100 + number, aliases[0], seconds)
            for number in range(users)
        ]
        if not await intervenes(visitors[0]):
            for visitor in visitors:
                visitor.tabs = {name: seen for name, seen in TABS.items() if name != "Intervene"}
        seconds.clear()
        end = time.monotonic() + lasting

        async def stay(visitor: Visitor) -> None:
            while time.monotonic() < end:
                await visitor.act()

        await asyncio.gather(*map(stay, visitors))
        report(f"{users} visitors for {lasting:.0f} s, {aliases[0]}", seconds)
        errors += [error for visitor in visitors for error in visitor.errors]
        await browser.close()
    print(f"errors that visitors saw: {len(errors)}", *errors[:5], sep="\n")
    return len(errors)


async def intervenes(visitor: Visitor) -> bool:
    """Return True if the model has heads to switch off."""
    await visitor.tab.get_by_role("tab", name="Intervene", exact=True).first.click()
    await visitor.tab.wait_for_selector("#intervene-board .vl-head, #intervene-board .vl-say")
    return bool(await visitor.tab.locator(".vl-head").count())


def report(title: str, seconds: dict[str, list[float]]) -> None:
    print(title)
    for name, values in sorted(seconds.items()):
        print(
            f"  {name:<22} median {statistics.median(values):.2f} s, largest {max(values):.2f} s, "
            f"n = {len(values)}"
        )
    print(f"  {sum(map(len, seconds.values()))} actions", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["vit-digits", "cnn-digits"])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "vitlens", "demo", *options.models, "--no-browser"]
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        ) as process:
            try:
                address = process.stdout.readline().strip()
                aliases = [
                    name.partition("=")[0].rpartition(":")[2].partition("@")[0]
                    for name in options.models
                ]
                failed = asyncio.run(
                    measure(address, aliases, options.users, options.seconds, Path(folder))
                )
            finally:
                process.send_signal(signal.SIGTERM)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
