"""Files that Ray Data reads, as the sources of an import. Ray is imported in `session.py` alone.

Begin reading with `opening.py`. Which readers there are, and what they take, is in `readers.py`.
"""

from __future__ import annotations

from insitu.grid.ray_data.opening import RayReader, open_ray_sources
from insitu.grid.ray_data.readers import READERS, ReaderRequest, parse_reader
