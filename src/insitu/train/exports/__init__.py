"""Models as files for others: written in several formats, loaded again, compared, and published.

Begin reading with `publishing.py`.
"""

from __future__ import annotations

from insitu.train.exports.formats import check_format
from insitu.train.exports.loading import ServedModel, Value, load_export
from insitu.train.exports.publishing import convert_export, find_exports, make_example, publish
