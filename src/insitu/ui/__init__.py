"""The page and the REST interface: `insitu ui`. All that knows a web framework is here.

`access.py` decides who may, `guard.py` stands before every request, `api.py` has the REST interface,
`pages.py` the page. Begin reading with `app.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.ui.guard import read_facts
    from insitu.ui.plugin_pages import Plan
    from insitu.ui.rules import check_origin
    from insitu.ui.running import (
        UIOptions,
        check_options,
        find_origins,
        make_config,
        open_socket,
        request_link,
        serve,
    )

__getattr__, __dir__ = export_lazily(__name__)
