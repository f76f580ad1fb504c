"""Rows of sources on their way into partitions, on one node. Begin reading with `import_plan.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.intake.import_plan import (
        CSV_OPTIONS,
        LEAST_PARTITIONS,
        ImportPlan,
        bytes_by_node,
        check_key,
        check_partitions_in_all,
        check_room,
        choose_block_rows,
        choose_partitions,
        describe_origin,
        find_primaries,
        fits_into_memory,
        measure_rows,
        most_readable,
        read_max_mappings,
        refuse_conflicts,
    )
    from insitu.grid.intake.import_rows import LABEL, ImportRows, columns_of_rows, count_routed, label_of
    from insitu.grid.intake.partition_builder import Finished, PartitionBuilders, TextsTooLong
    from insitu.grid.intake.row_plan import FILENAME, FOLDER, Destination, RowPlan
    from insitu.grid.intake.row_receiver import RowIntake, RowMessage
    from insitu.grid.intake.source_blocks import FileState, SourceBlocks
    from insitu.grid.intake.unchanged_files import find_earlier
    from insitu.grid.intake.unit_reader import (
        Unit,
        count_rows,
        cut_block,
        decode_options,
        encode_options,
        read_unit,
    )

__getattr__, __dir__ = export_lazily(__name__)
