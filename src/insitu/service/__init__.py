"""What the command line and the page both tell and do: jobs, caches and nodes in the forms of docs/json.md.

Begin reading with `jobs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.service.caches import build_cache_report, summarize_cache
    from insitu.service.catalog_index import CatalogIndex, Versions
    from insitu.service.column_statistics import describe_columns
    from insitu.service.examples import IMPORT_OPTIONS, find_example, list_examples
    from insitu.service.formats import (
        format_duration,
        format_position,
        format_size,
        format_split,
        format_staleness,
        format_time,
    )
    from insitu.service.job_index import JobIndex
    from insitu.service.jobs import (
        audit_epochs,
        build_job_report,
        report_snapshot,
        summarize_job,
        summarize_rates,
    )
    from insitu.service.logs import clean_line, find_incarnation, read_log
    from insitu.service.nodes import count_copies, list_nodes
    from insitu.service.preview import preview_rows
    from insitu.service.start_command import format_start_command
    from insitu.service.tensorboard import has_summaries, make_tensorboard_command

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "caches": ("build_cache_report", "summarize_cache"),
        "catalog_index": ("CatalogIndex", "Versions"),
        "column_statistics": ("describe_columns",),
        "examples": ("IMPORT_OPTIONS", "find_example", "list_examples"),
        "formats": (
            "format_duration",
            "format_position",
            "format_size",
            "format_split",
            "format_staleness",
            "format_time",
        ),
        "job_index": ("JobIndex",),
        "jobs": ("audit_epochs", "build_job_report", "report_snapshot", "summarize_job", "summarize_rates"),
        "logs": ("clean_line", "find_incarnation", "read_log"),
        "nodes": ("count_copies", "list_nodes"),
        "preview": ("preview_rows",),
        "start_command": ("format_start_command",),
        "tensorboard": ("has_summaries", "make_tensorboard_command"),
    },
)

__all__ = [
    "IMPORT_OPTIONS",
    "CatalogIndex",
    "JobIndex",
    "Versions",
    "audit_epochs",
    "build_cache_report",
    "build_job_report",
    "clean_line",
    "count_copies",
    "describe_columns",
    "find_example",
    "find_incarnation",
    "format_duration",
    "format_position",
    "format_size",
    "format_split",
    "format_staleness",
    "format_start_command",
    "format_time",
    "has_summaries",
    "list_examples",
    "list_nodes",
    "make_tensorboard_command",
    "preview_rows",
    "read_log",
    "report_snapshot",
    "summarize_cache",
    "summarize_job",
    "summarize_rates",
]
