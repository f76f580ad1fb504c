"""The page and the REST interface: `insitu ui`. All that knows a web framework is here.

`access.py` decides who may, `guard.py` stands before every request, `api.py` has the REST interface,
`pages.py` the page. Begin reading with `app.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.ui.running import UIOptions, request_link, serve

__getattr__, __dir__ = lazy_door(__name__, {"running": ("UIOptions", "request_link", "serve")})

__all__ = ["UIOptions", "request_link", "serve"]
