"""Tests mirror the source: `insitu/x/y.py` has `tests/unit/x/test_y.py`, or is listed here with its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
UNIT = TESTS / "unit"
SOURCE = TESTS.parent / "src" / "insitu"

OF_NO_MODULE = {
    "cli/test_help.py": "the help of all commands",
    "exchange/test_group_rejoin.py": "the second half of test_group.py",
    "grid/test_malformed_sources.py": "a law of all readers of files",
    "train/estimator/test_recorded_numbers.py": "canned estimators, by recorded numbers of tf.estimator",
    "train/features/test_random_columns.py": "a law of all columns",
    "test_check_commits.py": "tools/check_commits.py",
    "test_estimators_page.py": "docs/estimators.md",
    "test_features_page.py": "docs/features.md",
    "test_keras_page.py": "docs/keras.md",
    "test_keras_suite.py": "tests/support/keras_suite.py",
    "test_layering.py": "a law of all modules",
    "test_migration_page.py": "docs/migration.md",
    "test_mirror.py": "a law of all modules",
    "test_security_page.py": "docs/security.md",
    "test_strategies_page.py": "docs/strategies.md",
    "test_wire_formats.py": "what arrives over sockets, in all rooms",
    "test_words.py": "a law of all modules",
}
"""Unit tests of what isn't one module of insitu, and what that is."""

TESTED_BY = {
    "train/estimator/batches.py": "unit/train/estimator/test_estimator.py",
    "train/estimator/__init__.py": "unit/test_missing_names.py",
    "train/features/vocabulary_files.py": "unit/train/replica/test_vocabularies.py",
    "grid/elsewhere.py": "unit/grid/test_damaged_copies.py",
    "grid/partitions/block_checks.py": "unit/grid/test_store.py",
    "grid/partitions/block_layout.py": "unit/grid/partitions/test_block_reader.py",
    "cluster/agents/agent_files.py": "process/test_cluster_files.py",
    "cluster/client/file_cluster.py": "process/test_cluster_files.py",
    "cluster/files/client.py": "unit/cluster/files/test_service.py",
    "cluster/files/peers.py": "unit/cluster/files/test_service.py",
    "cluster/files/repairing.py": "unit/cluster/files/test_service.py",
    "grid/shared_files/store.py": "unit/cluster/client/test_file_system.py",
    "cluster/agents/agent.py": "process/test_agents.py",
    "cluster/agents/agent_answers.py": "process/test_host_jobs.py",
    "cluster/agents/job_copying.py": "unit/cluster/client/test_job_bringing.py",
    "cluster/agents/job_copy_folder.py": "unit/cluster/client/test_job_bringing.py",
    "cluster/agents/job_copy_reading.py": "unit/cluster/client/test_job_bringing.py",
    "cluster/agents/job_copy_serving.py": "unit/cluster/client/test_job_bringing.py",
    "cluster/agents/own_folders.py": "unit/cluster/client/test_job_bringing.py",
    "cluster/agents/take_over.py": "process/test_host_jobs.py",
    "cluster/agents/head_starting.py": "process/test_agents.py",
    "cluster/agents/head_finding.py": "process/test_agents.py",
    "cluster/agents/known_agents.py": "process/test_agents.py",
    "cluster/agents/file_pushes.py": "process/test_host_jobs.py",
    "cluster/agents/host_server.py": "process/test_host_jobs.py",
    "cluster/agents/hosts.py": "process/test_agents.py",
    "cluster/agents/hosts_engine.py": "process/test_host_jobs.py",
    "cluster/agents/job_supplies.py": "process/test_host_jobs.py",
    "cluster/agents/partition_fetch.py": "process/test_host_jobs.py",
    "cluster/agents/refresh_reading.py": "fault/test_hosts_ignite.py",
    "cluster/agents/copy_restoring.py": "process/test_moving_jobs.py",
    "cluster/agents/drain_on_term.py": "process/test_moving_jobs.py",
    "cluster/agents/node_list.py": "process/test_agents.py",
    "cluster/agents/node_draining.py": "process/test_moving_jobs.py",
    "cluster/agents/saved_members.py": "process/test_moving_jobs.py",
    "cluster/agents/stores.py": "process/test_agents.py",
    "cluster/agents/upkeep.py": "process/test_agents.py",
    "cli/rest.py": "unit/cli/test_by_url.py",
    "cli/start_by_url.py": "unit/cli/test_by_url.py",
    "cli/fetch.py": "process/test_agents.py",
    "cli/rebalance.py": "process/test_agents.py",
    "cli/remote.py": "process/test_agents.py",
    "grid/copies_here.py": "unit/grid/test_import_owners.py",
    "grid/staged_imports.py": "unit/grid/test_import_owners.py",
    "grid/store_tidying.py": "unit/grid/transfer/test_remote_stores.py",
    "cluster/agents/remote.py": "process/test_agents.py",
    "cli/hosts.py": "process/test_agents.py",
    "cluster/decide/causes.py": "unit/cluster/decide/test_job.py",
    "train/strategies/experimental.py": "unit/train/strategies/test_communication.py",
    "train/custom_loop/input_context.py": "unit/train/custom_loop/test_worker_feed.py",
    "cluster/client/deletion.py": "unit/cli/test_delete.py",
    "cli/compression.py": "unit/cli/test_data.py",
    "cli/import_progress.py": "unit/cli/test_data.py",
    "cli/goodput.py": "unit/cli/test_top.py",
    "cli/ledger.py": "unit/cli/test_describe.py",
    "cli/metrics.py": "unit/cli/test_top.py",
    "cli/rates.py": "unit/cli/test_top.py",
    "grid/partitions/flat_tables.py": "unit/grid/partitions/test_ipc_footer.py",
    "grid/partitions/ipc_message.py": "unit/grid/partitions/test_compression.py",
    "grid/dataset_opening.py": "unit/grid/test_datasets.py",
    "grid/import_plan.py": "unit/grid/test_importer.py",
    "grid/import_sources.py": "unit/grid/test_importer.py",
    "grid/import_rows.py": "unit/grid/test_importer.py",
    "grid/row_plan.py": "unit/grid/test_row_intake.py",
    "grid/row_routing.py": "unit/grid/test_import_owners.py",
    "grid/transfer/import_actions.py": "unit/grid/test_node_reading.py",
    "grid/transfer/remote_import.py": "unit/grid/test_node_reading.py",
    "grid/transfer/row_sending.py": "unit/grid/test_node_reading.py",
    "grid/unit_reading.py": "unit/grid/test_node_reading.py",
    "grid/ignite/arrow_values.py": "unit/grid/ignite/test_fields.py",
    "grid/ignite/cluster.py": "unit/grid/ignite/test_source.py",
    "grid/ignite/connection.py": "unit/grid/ignite/test_source.py",
    "grid/ignite/description.py": "unit/grid/ignite/test_source.py",
    "grid/ignite/objects.py": "unit/grid/ignite/test_fields.py",
    "grid/ignite/row_order.py": "unit/grid/ignite/test_source.py",
    "grid/ignite/rows.py": "unit/grid/ignite/test_fields.py",
    "grid/ignite/values.py": "unit/grid/ignite/test_fields.py",
    "ui/actions.py": "unit/ui/test_app.py",
    "ui/api.py": "unit/ui/test_app.py",
    "ui/artifacts.py": "unit/ui/test_app.py",
    "ui/events.py": "unit/ui/test_app.py",
    "ui/guard.py": "unit/ui/test_app.py",
    "ui/job_view.py": "unit/ui/test_app.py",
    "ui/pages.py": "unit/ui/test_app.py",
    "ui/rendering.py": "unit/ui/test_app.py",
    "ui/state.py": "unit/ui/test_app.py",
    "ui/uploads.py": "unit/ui/test_app.py",
    "service/caches.py": "unit/cli/test_data.py",
    "service/formats.py": "unit/cli/test_console.py",
    "service/jobs.py": "unit/cli/test_describe.py",
    "service/nodes.py": "unit/cli/test_nodes.py",
    "grid/leftovers.py": "unit/grid/test_importer.py",
    "grid/source_blocks.py": "unit/grid/test_importer.py",
    "grid/conversion.py": "unit/train/fit/test_tf_dataset.py",
    "train/custom_loop/spmd.py": "unit/train/spmd/test_program.py",
    "train/custom_loop/torch.py": "process/test_strategies_matrix.py",
    "export_formats.py": "unit/train/exports/test_publishing.py",
    "train/exports/formats.py": "unit/train/exports/test_publishing.py",
    "train/estimator/agreement.py": "process/test_evaluator.py",
    "train/estimator/graph_model.py": "unit/train/estimator/test_estimator.py",
    "train/estimator/heads.py": "unit/train/estimator/test_canned.py",
    "train/estimator/model_function.py": "unit/train/estimator/test_estimator.py",
    "train/estimator/tracing.py": "unit/train/estimator/test_estimator.py",
    "parameters/failures.py": "unit/parameters/test_request_handler.py",
    "parameters/waiting_requests.py": "unit/parameters/test_request_handler.py",
    "train/parameter_server/attached_tables.py": "unit/train/parameter_server/test_layers.py",
    "train/parameter_server/server_table.py": "unit/train/parameter_server/test_layers.py",
    "train/features/column_layer.py": "unit/train/features/test_dense_features.py",
    "train/features/checks.py": "unit/train/features/test_feature_column.py",
    "train/features/dense_columns.py": "unit/train/features/test_dense_features.py",
    "train/placement/torch.py": "unit/train/placement/test_layers.py",
    "train/replica/loaded_tables.py": "unit/train/parameter_server/test_layers.py",
    "train/replica/base.py": "unit/train/strategies/test_multi_worker_mirrored.py",
    "train/replica/batch.py": "unit/train/fit/test_two_phase.py",
    "train/replica/building.py": "unit/train/strategies/test_one_device.py",
    "train/replica/fused.py": "unit/train/strategies/test_one_device.py",
    "train/replica/fused_jax.py": "unit/train/replica/test_jax.py",
    "train/replica/fused_torch.py": "unit/train/replica/test_torch.py",
    "train/replica/probe/jax.py": "process/test_same_as_keras.py",
    "train/replica/probe/outcome.py": "unit/train/replica/probe/test_probe.py",
    "train/replica/probe/refusals.py": "unit/train/replica/probe/test_probe.py",
    "train/replica/probe/tensorflow.py": "unit/train/replica/probe/test_probe.py",
    "train/replica/probe/torch.py": "process/test_same_as_keras.py",
    "train/replica/step_watch.py": "unit/train/replica/probe/test_probe.py",
    "train/replica/tensorflow.py": "unit/train/strategies/test_multi_worker_mirrored.py",
    "train/replica/tensorflow_memory.py": "unit/train/strategies/test_multi_worker_mirrored.py",
    "train/replicated/jax.py": "unit/train/strategies/test_multi_device.py",
    "train/replicated/step.py": "unit/train/strategies/test_multi_device.py",
    "train/replicated/torch.py": "unit/train/strategies/test_multi_device.py",
}
"""Modules that have no unit test file of their own, with the file under tests/ whose runs use them."""


def has_logic(path: Path) -> bool:
    """Whether a function of the module does anything: it has more than a docstring or `...`."""
    return any(
        not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
    )


def unit_test_of(module: Path) -> Path:
    """The file that tests a module; for a package's `__init__.py`, beside the package's folder."""
    relative = module.relative_to(SOURCE)
    if module.name == "__init__.py":
        return UNIT / relative.parent.parent / f"test_{relative.parent.name or SOURCE.name}.py"
    return UNIT / relative.with_name(f"test_{relative.name}")


MODULES = {str(m.relative_to(SOURCE)): m for m in sorted(SOURCE.rglob("*.py"))}
UNIT_TESTS = {str(t.relative_to(UNIT)) for t in sorted(UNIT.rglob("test_*.py"))}


def test_each_unit_test_stands_where_its_module_does():
    of_modules = {str(unit_test_of(module).relative_to(UNIT)) for module in MODULES.values()}
    assert UNIT_TESTS - of_modules == OF_NO_MODULE.keys()


@pytest.mark.parametrize("name", MODULES)
def test_each_module_with_logic_is_tested(name: str):
    module = MODULES[name]
    tested = unit_test_of(module).exists() or not has_logic(module)
    assert tested != (name in TESTED_BY), "has no test, or stands in TESTED_BY without need"


def test_what_tests_a_module_elsewhere_exists():
    assert TESTED_BY.keys() <= MODULES.keys()
    assert {tests for tests in TESTED_BY.values() if not (TESTS / tests).is_file()} == set()


def test_a_module_has_logic_if_a_function_has_a_body(tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text('class A:\n    def f(self):\n        """Return."""\n    def g(self): ...\n')
    assert not has_logic(path)
    path.write_text("class A:\n    def f(self):\n        return 1\n")
    assert has_logic(path)
