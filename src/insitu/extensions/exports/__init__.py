"""Models as files for others: written in several formats, loaded again, compared, published, and served.

Begin reading with `publishing.py`. `model_server.py` answers predictions for `insitu serve`; it alone imports
a web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.extensions.exports.formats import Exporter, ServedModel, Value, check_format, load_export
    from insitu.extensions.exports.model_server import ModelHolder, Served, serve_model
    from insitu.extensions.exports.publishing import convert_export, find_exports, make_example, publish

__getattr__, __dir__ = export_lazily(__name__)
