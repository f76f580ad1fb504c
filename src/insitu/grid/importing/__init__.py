"""How rows come in from files, other systems and other hosts. Begin reading with `importer.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.importing.appending import link_file, share_partitions
    from insitu.grid.importing.import_sources import find_source_files
    from insitu.grid.importing.importer import (
        check_names,
        import_cache,
        plan_import,
        run_import,
    )
    from insitu.grid.importing.inspection import Inspection, inspect_files
    from insitu.grid.importing.server_reading import ServerRequest, read_servers

__getattr__, __dir__ = export_lazily(__name__)
