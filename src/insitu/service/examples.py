"""The examples that come with insitu, as jobs that can be started."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError
from insitu.base.spec import NO_CACHE


@dataclass(frozen=True, slots=True)
class Example:
    """One example."""

    #: Its name, for links and the command line.
    name: str
    #: Its subject, in a few words.
    title: str
    #: Its lesson, and its requirements.
    about: str
    #: Its folder among the examples.
    folder: str
    #: JOB_CMD and its arguments.
    command: tuple[str, ...]
    #: The cache that it trains on.
    cache: str = NO_CACHE
    #: The cache to import beforehand, whose parts it reads; "": it makes its own data.
    data: str = ""
    #: Worker tasks.
    workers: int = 2
    #: Parameter server tasks.
    ps: int = 0


_DRAWINGS = (
    "Needs the bitmaps of some classes, one .npy file a class, such as cat.npy, from the public Quick, Draw! "
    "data."
)
EXAMPLES = (
    Example(
        "stripes",
        "Stripes",
        "Two workers tell upright stripes from level ones. It makes its own data and takes some seconds.",
        "strategies",
        ("fit.py",),
    ),
    Example(
        "quickdraw",
        "Quick, Draw!",
        f"A convolutional network learns ten classes of sketches and saves its model. {_DRAWINGS}",
        "quickdraw",
        ("train.py", "--epochs", "3"),
        "quickdraw/train",
        "quickdraw",
    ),
    Example(
        "quickdraw-servers",
        "Quick, Draw! on parameter servers",
        f"The same network, whose variables live on two parameter servers. {_DRAWINGS}",
        "quickdraw",
        ("train.py", "--mode", "async", "--epochs", "4"),
        "quickdraw/train",
        "quickdraw",
        ps=2,
    ),
    Example(
        "quickdraw-answers",
        "Quick, Draw! with answers",
        f"Guesses three words for each held-out sketch, and writes curves for TensorBoard. {_DRAWINGS}",
        "quickdraw",
        ("answers.py", "--how", "fit"),
        "quickdraw/train",
        "quickdraw",
    ),
)
IMPORT_OPTIONS = {"label_from_filename": True, "split": "train=0.9,test=0.1"}
"""How the data of examples is imported."""


def find_examples() -> Path | None:
    """Return the folder of the examples: in the package, or in the checkout; None if neither has them."""
    package = Path(__file__).parents[1]
    folders = (package / "examples", package.parents[1] / "examples")
    return next((folder for folder in folders if (folder / "quickdraw" / "train.py").is_file()), None)


def list_examples() -> list[dict[str, Any]]:
    """Return the examples in the form of docs/reference/json.md."""
    root = find_examples()
    if root is None:
        return []
    return [
        {**asdict(each), "command": list(each.command), "job_dir": str(root / each.folder)}
        for each in EXAMPLES
    ]


def find_example(name: str) -> dict[str, Any]:
    """Return one example. Raises InputError if there is none of this name."""
    examples = {each["name"]: each for each in list_examples()}
    if name not in examples:
        raise InputError(f"An example is one of {', '.join(examples) or 'none here'}. Received: {name[:100]}")
    return examples[name]
