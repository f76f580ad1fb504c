"""The page and the REST interface: `insitu ui`. All that knows a web framework is here.

`access.py` decides who may, `guard.py` stands before every request, `api.py` has the REST interface,
`pages.py` the page. Begin reading with `app.py`. `model_server.py` answers predictions for `insitu serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.doors import lazy_door

if TYPE_CHECKING:
    from insitu.ui.model_server import ModelHolder, Served, serve_model
    from insitu.ui.running import UIOptions, check_options, request_link, serve

__getattr__, __dir__ = lazy_door(__name__)
