"""Shared by the command line and the page: jobs, caches and nodes in the forms of docs/reference/json.md.

Begin reading with `jobs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.service.caches import (
        CatalogIndex,
        Versions,
        build_cache_report,
        pick_row,
        plain_row,
        preview_rows,
        read_first_rows,
        summarize_cache,
    )
    from insitu.service.client import Job, find_agents, import_data, start
    from insitu.service.column_statistics import describe_columns, measure_columns
    from insitu.service.doctor import (
        BackendFacts,
        Finding,
        can_train,
        find_allowed,
        judge_backend,
        judge_clock,
        judge_cluster,
        judge_compiled,
        judge_gpus,
        judge_home,
        judge_late,
        judge_libraries,
        judge_limits,
        judge_ports,
        judge_python,
        judge_shared_memory,
        report_findings,
    )
    from insitu.service.examples import IMPORT_OPTIONS, find_example, list_examples
    from insitu.service.formats import (
        format_duration,
        format_position,
        format_size,
        format_split,
        format_staleness,
        format_time,
    )
    from insitu.service.function_jobs import FunctionTask, run
    from insitu.service.job_template import (
        MOST_CLASSES,
        FeatureFacts,
        LabelFacts,
        choose_label,
        make_template,
        render_script,
    )
    from insitu.service.jobs import (
        JobIndex,
        audit_epochs,
        build_job_report,
        report_snapshot,
        summarize_job,
        summarize_rates,
    )
    from insitu.service.logs import clean_line, find_incarnation, read_log
    from insitu.service.nodes import count_copies, list_nodes
    from insitu.service.tensorboard import has_summaries, make_tensorboard_command
    from insitu.service.version_diff import compare_versions

__getattr__, __dir__ = export_lazily(__name__)
