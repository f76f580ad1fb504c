"""How the grid gets at the stores of other hosts, of which it knows nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from insitu.base.paths import Paths

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores

FindStores = Callable[[Paths], "RemoteStores | None"]
_finders: list[FindStores] = []


def set_store_finder(find: FindStores) -> None:
    """Have `find_stores_elsewhere` call this. `insitu` itself does so, which knows the room of the agents."""
    _finders[:] = [find]


def find_stores_elsewhere(paths: Paths) -> RemoteStores | None:
    """Return the stores of the other hosts of the cluster that this home belongs to; None if there are none.

    Raises InsituError, OSError.
    """
    return _finders[0](paths) if _finders else None
