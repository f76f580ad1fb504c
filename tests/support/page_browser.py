"""A browser that looks at a page of its own: Debian's Chromium, led by Playwright."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from job_runs import Insitu, wait_for

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = {"width": 1200, "height": 860}, {"width": 380, "height": 800}
QUICKDRAW = Path(__file__).parents[3] / "shared" / "data" / "quickdraw"
CLASSES = 10
_CHECKOUT, _SHOWN = Path(__file__).parents[2], "/opt/insitu"
_RENAME = """([from, to]) => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(from, to);
    for (const field of document.querySelectorAll("input:not([type=file])"))
        field.value = field.value.replaceAll(from, to);
}"""
SLOW = 60_000.0
"""Milliseconds that a loaded machine may take to show something."""


def find_browser() -> str | None:
    """The path of a browser, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def served(insitu: Insitu) -> Iterator[str]:
    """The page of a home, from `insitu ui`. Yields its link."""
    log = insitu.paths.home.parent / "ui.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            insitu.command("ui", "--port", "0", "--no-browser"),
            env={name: value for name, value in insitu.environment.items() if name != "DISPLAY"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        mark = "The page: "
        wait_for("the link", lambda: process.poll() is None and mark in log.read_text())
        yield log.read_text().partition(mark)[2].split()[0]
    finally:
        process.terminate()
        assert process.wait(30) is not None


@contextmanager
def browsing() -> Iterator[Any]:
    """A Chromium that nobody sees."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root can't have a sandbox; the browser sees only the page under test.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        yield browser
        browser.close()


class Visitor:
    """One window. What the browser complains of is an error of the test."""

    def __init__(self, browser: Any, pictures: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport=WIDE, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SLOW)
        self.pictures = pictures
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note_foreign)

    def _note_foreign(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:")):
            self.complaints.append(f"asked for {request.url}")

    def take(self, name: str, height: int | None = None) -> None:
        """Keep a picture of the page, or of the upper `height` pixels of it.

        It doesn't show where the checkout is.
        """
        part = {} if height is None else {"clip": {"x": 0, "y": 0, "width": WIDE["width"], "height": height}}
        # To hide the caret, Playwright would add a style of its own, about which the page's policy complains.
        path = str(self.pictures / f"{name}.png")
        self.page.evaluate(_RENAME, [str(_CHECKOUT), _SHOWN])
        self.page.screenshot(path=path, full_page=True, caret="initial", **part)
        self.page.evaluate(_RENAME, [_SHOWN, str(_CHECKOUT)])

    def fits(self) -> bool:
        """Whether nothing sticks out at the side."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def draw_classes(folder: Path, rows: int = 600) -> str:
    """Files of 28 x 28 pixels, one a class: real sketches where they are at hand. Returns their glob."""
    folder.mkdir()
    real = sorted(QUICKDRAW.glob("*.npy"))[:CLASSES]
    random = np.random.default_rng(0)
    for index in range(CLASSES):
        if real:
            np.save(folder / real[index].name, np.load(real[index])[:rows])
            continue
        drawn = random.integers(0, 40, (rows, 28, 28), dtype=np.uint8)
        drawn[:, 2 + 2 * index : 5 + 2 * index, 4:24] = 230
        np.save(folder / f"bar{index}.npy", drawn.reshape(-1, 784))
    return str(folder / "*.npy")


def sign_in(visitor: Visitor, link: str) -> None:
    visitor.page.goto(link)
    visitor.page.get_by_role("button", name="Sign in").click()
    visitor.page.get_by_role("heading", name="Jobs").wait_for()


def position(insitu: Insitu, job: str) -> tuple[int, int]:
    progress = insitu.json("describe", job)["progress"] or {"epoch": -1, "step": -1}
    return progress["epoch"], progress["step"]


def check_requirements() -> int:
    """Say what `make test-ui` lacks, and how to get it."""
    missing = []
    if find_browser() is None:
        missing.append("a browser: apt-get install chromium")
    for module in ("playwright", "fastapi", "uvicorn", "jinja2"):
        try:
            __import__(module)
        except ImportError:
            missing.append(f"{module}: .venv/bin/python -m pip install {module}")
    for line in missing:
        sys.stderr.write(f"make test-ui needs {line}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(check_requirements())
