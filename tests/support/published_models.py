"""A job's folder with models that exporters have published."""

from __future__ import annotations

from pathlib import Path

from insitu.base.paths import JobPaths, Paths


def publish_models(home: Path) -> JobPaths:
    """Return a job whose exporters have published models, the best of which isn't the last."""
    job = Paths(home).job("people-aa11")
    for name, steps in (("best", (100, 200)), ("final", (300,))):
        (job.exports / name).mkdir(parents=True)
        for step in steps:
            (job.exports / name / f"{step:08d}.keras").write_text(f"{name} {step}")
    (job.exports / "best" / "best.json").write_text("{}")
    # What is no export: half-written, and a user's own.
    (job.exports / "final" / ".staging-x").mkdir()
    (job.exports / "final" / "99999999.txt").write_text("")
    return job


def publish_saved_model(job: JobPaths) -> None:
    """Add a SavedModel of more steps than the others."""
    folder = job.exports / "latest" / "00000400" / "variables"
    folder.mkdir(parents=True)
    (folder / "data").write_text("latest 400")
