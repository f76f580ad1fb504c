"""Options of `insitu start` and `insitu import`: each is declared once, for all doors by which it is given.

The doors are the command line, the REST interface and the forms of the page. Begin reading with
`job_options.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.options.declaring import (
        Declared,
        Door,
        Option,
        format_options,
        list_given,
        option,
        options_at,
        options_of,
        show_value,
    )
    from insitu.options.import_options import ImportOptions, parse_images
    from insitu.options.job_options import JobOptions

__getattr__, __dir__ = export_lazily(__name__)
