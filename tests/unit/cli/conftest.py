"""What the tests of the command line share."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Typer takes from Click what Click calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.testing  # noqa: F401
