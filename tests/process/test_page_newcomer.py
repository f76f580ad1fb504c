"""A newcomer in a browser: from sketches on a disk to a model, through the loss of a worker.

And what the page is for everybody: readable, by the keyboard, with long logs."""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu, insitu_at, wait_for
from page_browser import Visitor, browsing, draw_classes, position, served, sign_in
from page_checks import find_poor_contrast, walk_by_keyboard

pytestmark = [pytest.mark.ui, pytest.mark.timeout(330)]
LINES = 1_000_000
PATIENT = 150_000.0
"""Milliseconds that a loaded machine may take to start a worker, or to train."""


@pytest.fixture
def pictures() -> Path:
    folder = Path(os.environ.get("TEST_UI_PICTURES", "build/page")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as made:
        made.environment |= {"KERAS_BACKEND": "jax"}
        made.run("up", "--nodes", "2")
        yield made


@pytest.fixture
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


def import_sketches(page: Any, files: list[str]) -> None:
    """Follow the example to the data that it lacks, and send the files."""
    page.get_by_role("link", name="Start", exact=True).click()
    page.get_by_role("link", name="Quick, Draw!", exact=True).click()
    page.get_by_role("link", name="Import it first").click()
    page.get_by_label("or files to send").set_input_files(files)
    page.get_by_label("Partitions", exact=True).fill("4")
    page.get_by_role("button", name="Import").click()
    page.locator(".state-finished").wait_for()


def test_a_newcomer_trains_on_sketches_and_takes_the_model_away(
    insitu: Insitu, browser: Any, pictures: Path, tmp_path: Path
) -> None:
    files = sorted(map(str, Path(draw_classes(tmp_path / "drawings", 400)).parent.glob("*.npy")))
    with served(insitu) as link:
        visitor = Visitor(browser, pictures)
        page = visitor.page
        sign_in(visitor, link)
        import_sketches(page, files)
        page.get_by_role("link", name="Start", exact=True).click()
        page.get_by_role("link", name="Quick, Draw!", exact=True).click()
        page.get_by_text("insitu start --detach").wait_for()
        visitor.take("example")
        page.get_by_role("button", name="Start", exact=True).click()
        page.locator("#head .state").wait_for()
        job = str(page.url.rpartition("/")[2])
        wait_for("training", lambda: position(insitu, job) >= (0, 4), 120)
        page.locator("#curves figure").first.wait_for()
        # In another shell: a worker is killed.
        tasks = {task["task"]: task for task in insitu.json("describe", job)["task_list"]}
        os.kill(tasks["worker:1"]["pid"], signal.SIGKILL)
        page.locator(".timeline .event-bad", has_text="worker:1 replaced").wait_for()
        page.get_by_text("The next step came").wait_for(timeout=PATIENT)
        # What it cost: in the timeline, in the bar, and in words.
        page.locator("#goodput .losses li", has_text="tasks that were lost").wait_for()
        page.locator("#head .state-finished").wait_for(timeout=PATIENT)
        visitor.take("newcomer")
        account = insitu.json("describe", job, "--goodput")["goodput"]
        assert account["seconds"]["recovery"] > 0
        assert sum(account["seconds"].values()) == pytest.approx(account["wall"], rel=0.01)
        with page.expect_download() as waiting:
            page.get_by_role("link", name="code/quickdraw.keras").click()
        waiting.value.save_as(tmp_path / "taken.keras")
        with zipfile.ZipFile(tmp_path / "taken.keras") as model:
            assert model.testzip() is None and "model.weights.h5" in model.namelist()
        assert (tmp_path / "taken.keras").read_bytes() == (
            insitu.job(job).code / "quickdraw.keras"
        ).read_bytes()
        check_everybody_can_read_it(visitor, browser, job, "quickdraw/train")
        assert visitor.complaints == []


def check_everybody_can_read_it(visitor: Visitor, browser: Any, job: str, cache: str) -> None:
    """Each page has contrast in light and dark, and a visible way through it by the keyboard."""
    origin = visitor.page.evaluate("location.origin")
    state = visitor.context.storage_state()
    for scheme in ("light", "dark"):
        other = Visitor(browser, visitor.pictures, color_scheme=scheme, storage_state=state)
        for path in (
            "/",
            "/data",
            f"/data/{cache}",
            "/nodes",
            "/start",
            f"/compare?job={job}",
            f"/jobs/{job}",
        ):
            other.page.goto(f"{origin}{path}")
            other.page.wait_for_load_state("load")
            count, poor = find_poor_contrast(other.page)
            assert count > 10 and poor == [], (scheme, path)
            if scheme == "light":
                stops = walk_by_keyboard(other.page)
                assert stops[0]["name"] == "Skip to the content" and len(stops) > 6
                assert [s for s in stops if not (s["ring"] and s["seen"])] == [], path
        other.context.close()


def test_a_log_of_a_million_lines_is_read_in_windows(insitu: Insitu, browser: Any, pictures: Path) -> None:
    insitu.script("print('short')")
    job = insitu.start("--workers", "1").job_id
    with insitu.job(job).output.open("w") as file:
        file.writelines(
            f"[worker:0] line {number} of many, with a text behind it\n" for number in range(LINES)
        )
    with served(insitu) as link:
        visitor = Visitor(browser, pictures)
        sign_in(visitor, link)
        page = visitor.page
        page.goto(f"{link.partition('/login')[0]}/jobs/{job}")
        page.get_by_text(f"line {LINES - 1} of many").wait_for()
        assert page.locator("#log .line").count() == 300
        page.get_by_role("link", name="Earlier lines").click()
        page.get_by_text(f"line {LINES - 301} of many").wait_for()
        page.get_by_placeholder("Find in the log").fill("line 17 of")
        page.get_by_role("button", name="Show").click()
        page.locator("#log .line", has_text="line 17 of many").wait_for()
        assert page.locator("#log .line").count() == 1
        assert page.locator("*").count() < 5000
        assert visitor.complaints == []
