"""Tasks are killed or suspended at any event of a training: all that it leaves behind is as without that.

One script with all of Keras' callbacks, and a user's, runs undisturbed and with faults. Its files, histories,
ledger and what its callbacks remember are compared. A job has many faults, one after the other. On hosts:
test_hosts_disturbed.py, on nodes of Ray: test_hosts_ray_disturbed.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from disturbed_faults import (
    ALL_AT_ONCE,
    AT_EPOCHS,
    CHIEF,
    EPOCHS,
    FEW,
    FEW_OF_CALLS,
    FEWEST,
    OF_CALLS,
    OF_LOOPS,
    OF_RECOVERIES,
    OF_THE_ROLES,
    OTHER,
    STANDBY,
    WITHIN,
    WITHIN_OF_THE_OTHER,
    Comparison,
    at,
    compare_with_local,
    in_call,
    inside,
    killing,
    make_all,
    suspended,
)
from disturbed_hits import CONTROLLER, SUPERVISOR
from disturbed_jobs import Fault, run

pytestmark = pytest.mark.timeout(1800)

TORCH = pytest.param("torch", marks=pytest.mark.torch)
BACKENDS = ["tensorflow", "jax", TORCH]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Jobs in a home with the cache of the script."""
    return compare_with_local(tmp_path_factory.mktemp("disturbed"), 2)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("jax", marks=pytest.mark.slow), TORCH])
def test_kills_change_nothing(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    jobs.check(tmp_path, FEW, "--workers", "2", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("tasks", [(CHIEF, OTHER), (OTHER, CHIEF)], ids=["chief", "other"])
def test_each_event(
    jobs: Comparison, tmp_path: Path, tasks: tuple[str, str], number: int, backend: str
) -> None:
    jobs.check(tmp_path, make_all(*tasks)[number], "--workers", "2", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("faults", [WITHIN, WITHIN_OF_THE_OTHER], ids=["chief", "other"])
def test_within_saves_checkpoints_and_between_calls(
    jobs: Comparison, tmp_path: Path, faults: list[Fault], backend: str
) -> None:
    jobs.check(tmp_path, faults, "--workers", "2", backend=backend)


@pytest.mark.parametrize(
    ("faults", "backend"),
    [
        pytest.param(FEWEST, "tensorflow", marks=pytest.mark.long),
        pytest.param(FEW, "jax", marks=pytest.mark.slow),
        pytest.param(FEW, "torch", marks=[pytest.mark.slow, pytest.mark.torch]),
    ],
    ids=["tensorflow", "jax", "torch"],
)
def test_a_chief_beside_workers(jobs: Comparison, tmp_path: Path, faults: list[Fault], backend: str) -> None:
    jobs.check(tmp_path, faults, "--workers", "1", "--chief", backend=backend)


@pytest.mark.long
def test_a_chief_that_is_a_task_of_its_own(jobs: Comparison, tmp_path: Path) -> None:
    jobs.check(tmp_path, OF_THE_ROLES, "--workers", "1", "--chief", script="alone.py")


@pytest.mark.slow
def test_all_die_in_a_recovery(jobs: Comparison, tmp_path: Path) -> None:
    faults = [at(OTHER, "epoch_end", 1, when="first"), inside(CHIEF, "recovery")]
    jobs.check(tmp_path, faults, "--workers", "2")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_others_die_in_a_recovery(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    jobs.check(tmp_path, OF_RECOVERIES, "--workers", "3", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_tasks_that_stand_still(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    faults = suspended([at(CHIEF, "epoch_end", 1), at(OTHER, "train_batch_end", 2, 2)])
    jobs.check(tmp_path, faults, "--workers", "2", "--stall-timeout", "15", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("on_loss", ["adopt", "restart"])
def test_other_policies(jobs: Comparison, tmp_path: Path, on_loss: str, backend: str) -> None:
    faults = [
        at(CHIEF, "epoch_end", 0),
        at(OTHER, "train_batch_end", 1, 2),
        at(OTHER, "test_batch_end", 2, 1),
        at(CHIEF, "epoch_end", EPOCHS - 1),
    ]
    jobs.check(tmp_path, faults, "--workers", "2", "--on-loss", on_loss, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_standby_processes(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    faults = [*killing(STANDBY, [at(CHIEF, "test_begin", 0)]), *FEW]
    jobs.check(tmp_path, faults, "--workers", "2", "--standby", "1", backend=backend)


@pytest.mark.parametrize(
    ("faults", "backend"),
    [
        pytest.param(FEW_OF_CALLS, "tensorflow", marks=pytest.mark.long),
        *(pytest.param(OF_CALLS, backend, marks=pytest.mark.slow) for backend in ("tensorflow", "jax")),
        pytest.param(OF_CALLS, "torch", marks=[pytest.mark.slow, pytest.mark.torch]),
    ],
    ids=["few", "tensorflow", "jax", "torch"],
)
def test_callbacks_of_evaluate_and_predict(
    jobs: Comparison, tmp_path: Path, faults: list[Fault], backend: str
) -> None:
    jobs.check(tmp_path, faults, "--workers", "2", script="calls.py", backend=backend)


@pytest.mark.parametrize(
    ("faults", "backend"),
    [
        pytest.param(OF_LOOPS[2:], "jax", marks=pytest.mark.long),
        pytest.param(OF_LOOPS, "tensorflow", marks=pytest.mark.slow),
        pytest.param(killing("", OF_LOOPS), "tensorflow", marks=pytest.mark.slow),
        pytest.param(OF_LOOPS, "torch", marks=[pytest.mark.slow, pytest.mark.torch]),
    ],
    ids=["jax", "tensorflow", "all-at-once", "torch"],
)
def test_in_the_body_of_a_loop(jobs: Comparison, tmp_path: Path, faults: list[Fault], backend: str) -> None:
    jobs.check(tmp_path, faults, "--workers", "2", script="loop.py", backend=backend)


def find_told_wrong(lines: list[str], undisturbed: list[str], faults: int) -> list[str]:
    """Return what is wrong about what a callback was told: lines of an event, and whether it may have been
    heard before."""
    told = [line.rsplit(" ", 1) for line in lines]
    heard = [event for event, repeated in told if repeated == "False"]
    wrong = [f"{event} twice as new" for event in set(heard) if heard.count(event) > 1]
    expected = [line.rsplit(" ", 1)[0] for line in undisturbed]
    all_heard = {event for event, _ in told}
    wrong += [f"{event} never" for event in expected if event not in all_heard]
    # An event in which a process was killed may not have been heard by this callback.
    missing = set(expected) - set(heard)
    return wrong if len(missing) <= faults else [*wrong, f"never as new: {sorted(missing)}"]


@pytest.mark.long
def test_a_callback_is_told_what_restarts_repeat(jobs: Comparison, tmp_path: Path) -> None:
    options = ("--workers", "2", "--on-loss", "restart")
    faults = [
        at(OTHER, "train_batch_end", 1, 1),
        *killing("", [at(CHIEF, "test_batch_end", 1, 2, when="first"), at(CHIEF, "epoch_end", 2)]),
        in_call(1, CHIEF, "test_batch_end", batch=1),
    ]
    expected, _ = run(jobs.place, tmp_path / "undisturbed", options, script="told.py")
    found, printed = run(jobs.place, tmp_path / "disturbed", options, faults, script="told.py")
    lines, undisturbed = found["told"].splitlines(), expected["told"].splitlines()
    assert all(line.endswith("False") for line in undisturbed)
    assert len(lines) > len(undisturbed), "restarts have repeated events"
    assert find_told_wrong(lines, undisturbed, len(faults)) == [], f"{lines}\n{printed[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_die_at_once_and_the_job_is_resumed(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    jobs.check(tmp_path, ALL_AT_ONCE, "--workers", "2", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_all_die_within_saves_and_between_calls(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    jobs.check(tmp_path, killing("", WITHIN), "--workers", "2", backend=backend)


@pytest.mark.slow
def test_controllers_and_supervisors(jobs: Comparison, tmp_path: Path) -> None:
    faults = [at(CHIEF, "epoch_end", 0), at(OTHER, "train_batch_end", 1, 3)]
    faults = [
        *killing(CONTROLLER, faults),
        *killing(SUPERVISOR, [inside(CHIEF, "save", epoch=3), at(CHIEF, "epoch_end", 2)]),
        *killing(CONTROLLER, [at(OTHER, "train_end", when="first")]),
    ]
    jobs.check(tmp_path, faults, "--workers", "2")


@pytest.mark.slow
def test_a_controller_that_stands_still(jobs: Comparison, tmp_path: Path) -> None:
    """A task dies meanwhile."""
    faults = [
        *suspended(killing(CONTROLLER, [at(CHIEF, "epoch_end", 0)])),
        at(OTHER, "train_batch_end", 1, 3),
    ]
    jobs.check(tmp_path, faults, "--workers", "2")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluator_beside(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    faults = [
        at(CHIEF, "epoch_end", 0),
        inside("evaluator:0", "score", batch=0),
        at(CHIEF, "epoch_end", EPOCHS - 1),
    ]
    jobs.check(tmp_path, faults, "--workers", "2", "--evaluator", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_devices_a_worker(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    jobs.check(tmp_path, FEW, "--workers", "2", backend=backend, INSITU_VIRTUAL_DEVICES="cpu:2")


@pytest.mark.parametrize(
    ("faults", "backend"),
    [
        pytest.param([AT_EPOCHS[1], AT_EPOCHS[3], AT_EPOCHS[4]], "tensorflow", marks=pytest.mark.long),
        *(pytest.param(AT_EPOCHS, backend, marks=pytest.mark.slow) for backend in ("tensorflow", "jax")),
        pytest.param(AT_EPOCHS, "torch", marks=[pytest.mark.slow, pytest.mark.torch]),
    ],
    ids=["few", "tensorflow", "jax", "torch"],
)
def test_workers_on_servers_die_at_the_ends_of_epochs(
    jobs: Comparison, tmp_path: Path, faults: list[Fault], backend: str
) -> None:
    jobs.check(tmp_path, faults, "--workers", "2", "--ps", "1", STRATEGY="servers", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_servers_die(jobs: Comparison, tmp_path: Path, backend: str) -> None:
    faults = [inside("ps:0", "push", batch=3), inside("ps:1", "push", batch=9), at(CHIEF, "epoch_end", 2)]
    options = ("--workers", "2", "--ps", "2", "--ps-backups", "1")
    jobs.check(tmp_path, faults, *options, STRATEGY="servers", backend=backend)


@pytest.mark.slow
def test_a_server_stands_still(jobs: Comparison, tmp_path: Path) -> None:
    faults = suspended([inside("ps:1", "push", batch=9)])
    options = ("--workers", "2", "--ps", "2", "--ps-backups", "1", "--stall-timeout", "15")
    jobs.check(tmp_path, faults, *options, STRATEGY="servers")


@pytest.mark.slow
def test_servers_without_mirrors_die(jobs: Comparison, tmp_path: Path) -> None:
    """All start again from the last checkpoint."""
    faults = [inside("ps:0", "push", batch=3), inside("ps:1", "push", batch=17)]
    jobs.check(tmp_path, faults, "--workers", "2", "--ps", "2", STRATEGY="servers")


@pytest.mark.slow
def test_all_on_servers_die_at_once(jobs: Comparison, tmp_path: Path) -> None:
    faults = killing("", [AT_EPOCHS[1], AT_EPOCHS[3], AT_EPOCHS[4]])
    jobs.check(tmp_path, faults, "--workers", "2", "--ps", "1", STRATEGY="servers")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_worker_alone_on_servers(jobs: Comparison, tmp_path: Path, mode: str) -> None:
    faults = [fault for fault in AT_EPOCHS if fault["task"] == CHIEF]
    jobs.check(tmp_path, faults, "--workers", "1", "--ps", "1", STRATEGY=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "bounded", "backup", "hybrid"])
def test_workers_that_need_not_agree_leave_the_same_files(
    jobs: Comparison, tmp_path: Path, mode: str
) -> None:
    """Numbers depend on which worker is first; which files there are, and what callbacks hear, doesn't."""
    jobs.check(tmp_path, AT_EPOCHS, "--workers", "2", "--ps", "1", outlined=True, STRATEGY=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "bounded", "backup", "hybrid"])
def test_servers_of_workers_that_need_not_agree_die(jobs: Comparison, tmp_path: Path, mode: str) -> None:
    faults = [inside("ps:0", "push", batch=3), inside("ps:1", "push", batch=17)]
    options = ("--workers", "2", "--ps", "2", "--ps-backups", "1")
    jobs.check(tmp_path, faults, *options, outlined=True, STRATEGY=mode)
