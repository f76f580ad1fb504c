"""The page in a real browser, from an import to a model that was taken away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu, insitu_at, wait_for
from page_browser import NARROW, SLOW, WIDE, Visitor, browsing, draw_classes, position, served, sign_in

pytestmark = [pytest.mark.ui, pytest.mark.timeout(330)]
SCRIPTS = Path(__file__).parents[1] / "support" / "page_job"


@pytest.fixture
def pictures() -> Path:
    """The folder of pictures; TEST_UI_PICTURES names it."""
    folder = Path(os.environ.get("TEST_UI_PICTURES", "build/page")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as made:
        made.run("up", "--nodes", "3")
        yield made


@pytest.fixture
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


def import_drawings(visitor: Visitor, files: str) -> None:
    page = visitor.page
    page.get_by_role("link", name="Data", exact=True).click()
    page.get_by_label("Cache", exact=True).fill("drawings")
    page.get_by_label("Files, folders or globs").fill(files)
    page.get_by_label("Split into parts").fill("train=0.9,test=0.1")
    page.get_by_label("Partitions", exact=True).fill("6")
    page.get_by_label("Backups").fill("1")
    page.get_by_label("One file per class").check()
    page.get_by_role("button", name="Import").click()
    page.locator(".state-finished").wait_for()  # pushed: nobody has reloaded the page
    page.get_by_role("link", name="Show the caches").click()
    visitor.take("data")
    page.get_by_role("link", name="drawings/train").click()
    page.locator(".rows img").first.wait_for()
    visitor.take("cache")


def start_job(visitor: Visitor) -> str:
    """Start a job from the form, by the keyboard alone. Returns its id."""
    page = visitor.page
    page.get_by_role("link", name="Train on it").press("Enter")
    page.get_by_label("Command and arguments").press("a")
    page.keyboard.press("Backspace")
    page.keyboard.type("train.py 200")
    page.keyboard.press("Tab")
    page.keyboard.type(str(SCRIPTS))
    page.get_by_label("Workers", exact=True).focus()
    page.keyboard.type("2")
    page.get_by_text("insitu start --detach --workers 2 drawings/train").wait_for()
    visitor.take("start")
    page.keyboard.press("Enter")
    page.locator("#head .state").wait_for()
    return str(page.url.rpartition("/")[2])


def lose_a_worker(insitu: Insitu, visitor: Visitor, job: str) -> None:
    """Kill a worker from elsewhere, and see it on the page."""
    tasks = {task["task"]: task for task in insitu.json("describe", job)["task_list"]}
    os.kill(tasks["worker:1"]["pid"], signal.SIGKILL)
    visitor.page.locator(".timeline .event-bad", has_text="worker:1 replaced").wait_for()
    wait_for("the next step", lambda: insitu.json("describe", job)["recoveries"][0]["seconds"])
    visitor.page.get_by_text("The next step came").wait_for()


def confirm(visitor: Visitor, job: str, what: str) -> None:
    visitor.page.locator("summary", has_text=what).click()
    visitor.page.get_by_role("button", name=f"{what} {job}").click()


def test_a_training_from_the_browser_alone(
    insitu: Insitu, browser: Any, pictures: Path, tmp_path: Path
) -> None:
    files = draw_classes(tmp_path / "drawings")
    with served(insitu) as link:
        visitor = Visitor(browser, pictures)
        page = visitor.page
        page.goto(link)
        visitor.take("login")
        sign_in(visitor, link)
        import_drawings(visitor, files)
        job = start_job(visitor)
        wait_for("training", lambda: position(insitu, job) >= (1, 0), 120)
        moving = page.locator("#head dd").first
        before = moving.inner_text()
        page.wait_for_function(
            "before => document.querySelector('#head dd').innerText !== before", arg=before, timeout=SLOW
        )
        lose_a_worker(insitu, visitor, job)
        visitor.take("job", 1900)
        page.locator("summary", has_text="Scale").click()
        page.get_by_label("Workers from now on").fill("1")
        page.get_by_role("button", name=f"Scale {job}").click()
        page.locator(".timeline li", has_text="released").wait_for()
        dark = Visitor(browser, pictures, color_scheme="dark", storage_state=visitor.context.storage_state())
        dark.page.goto(page.url)
        dark.page.locator("#log .line").first.wait_for()
        dark.take("job-dark")
        confirm(visitor, job, "Stop")
        page.locator("#head .state-stopped, #head .state", has_text="stopped").wait_for()
        stopped_at = position(insitu, job)
        page.reload()
        confirm(visitor, job, "Resume")
        page.locator("#head .state-running").wait_for()
        wait_for("the job to continue", lambda: position(insitu, job) > stopped_at, 120)
        check_narrow(visitor, job)
        confirm(visitor, job, "Stop")
        page.locator("#head .state", has_text="stopped").wait_for()
        show_jobs(insitu, visitor)
        assert visitor.complaints == [] and dark.complaints == []


def show_jobs(insitu: Insitu, visitor: Visitor) -> None:
    """Keep a picture of the list, with a job that has finished and one that has failed."""
    insitu.script("import sys; sys.exit(len(sys.argv) - 1)")
    insitu.run("start", "--workers", "1", "--name", "sums", "-", str(insitu.folder), "train.py")
    failing = ("--workers", "1", "--name", "counts", "--max-restarts", "0", "-", str(insitu.folder))
    insitu.run("start", *failing, "train.py", "x", code=1)
    visitor.page.set_viewport_size(WIDE)
    visitor.page.goto(visitor.page.evaluate("location.origin"))
    visitor.page.locator(".state-failed").wait_for()
    visitor.take("jobs", 400)


def check_narrow(visitor: Visitor, job: str) -> None:
    """Each page fits a small screen."""
    visitor.page.set_viewport_size(NARROW)
    origin = visitor.page.evaluate("location.origin")
    for path in (
        "/",
        "/data",
        "/data/drawings/train",
        "/nodes",
        "/start",
        f"/compare?job={job}",
        f"/jobs/{job}",
    ):
        visitor.page.goto(f"{origin}{path}")
        assert visitor.fits(), path
        visitor.take(
            "small-" + (path.partition("?")[0].strip("/").replace("/", "-").replace(job, "job") or "jobs")
        )


def test_nobody_gets_in_without_a_link_and_a_viewer_sees_no_buttons(
    insitu: Insitu, browser: Any, pictures: Path
) -> None:
    with served(insitu) as link:
        visitor = Visitor(browser, pictures)
        page = visitor.page
        origin = link.partition("/login")[0]
        page.goto(f"{origin}/data")
        assert page.url == f"{origin}/login"
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("alert").wait_for()
        assert "403" in " ".join(visitor.complaints)  # the browser's own line about the answer
        viewer = insitu.run("ui", "--link", "--role", "view").stdout.strip()
        sign_in(visitor, viewer)
        assert page.get_by_role("link", name="Start", exact=True).count() == 0
        page.goto(viewer)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("was used already").wait_for()
        record = json.loads(insitu.paths.ui(os.geteuid()).read_text())
        assert record["url"] == origin
    assert not insitu.paths.ui(os.geteuid()).exists()


def test_a_log_is_text_and_the_policy_stops_a_script_that_comes_through(
    insitu: Insitu, browser: Any, pictures: Path
) -> None:
    insitu.script(
        "print('\\x1b[2J<img src=x onerror=\"document.title=1\"><script>document.title=2</script>')"
    )
    job = insitu.start("--workers", "1").job_id
    with served(insitu) as link:
        visitor = Visitor(browser, pictures)
        sign_in(visitor, link)
        page = visitor.page
        page.goto(f"{link.partition('/login')[0]}/jobs/{job}")
        page.locator("#log .line", has_text="<script>").wait_for()
        assert page.title() == f"{job} · insitu" and visitor.complaints == []
        page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=3\">')"
        )
        wait_for("the browser's complaint", lambda: page.evaluate("1") and visitor.complaints)
        assert page.title() == f"{job} · insitu"
