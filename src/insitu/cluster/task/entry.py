"""Entry of every task process: `python -P -m insitu.cluster.task.entry JOB_CMD [JOB_ARGS...]`.

Its environment is the contract already; this sets up what an environment can't: the tie to the
supervisor's life, the stack dumps, the seed and the record of a failure. Loads the standard library only.
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import random
import signal
import sys
import types
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

PARENT_ENV = "INSITU_SUPERVISOR_PID"
"""Process id of the job's supervisor: a task finds out by it that it was orphaned before it was tied to
that."""

STANDBY_OPTION = "--standby"
"""Before a descriptor and JOB_CMD: preload the script's imports and wait to become a task."""


def main() -> None:
    parent = int(os.environ.pop(PARENT_ENV, "0"))
    from insitu.base.process.processes import die_with_parent

    if parent:
        die_with_parent(signal.SIGKILL, parent)
    from pathlib import Path

    from insitu.base.errors import JobSpecError
    from insitu.base.measure.time_account import ACCOUNT
    from insitu.cluster.task.command import fill_placeholders, resolve_command

    descriptor = 0
    if sys.argv[1] == STANDBY_OPTION:
        descriptor = int(sys.argv[2])
        del sys.argv[1:3]
    try:
        resolved = resolve_command(Path.cwd(), sys.argv[1:], sys.executable)
    except JobSpecError as error:
        sys.exit(str(error))
    from insitu.cluster.task.lazy_imports import install_lazy_imports

    install_lazy_imports()
    if descriptor:
        from insitu.cluster.task.preload import wait_as_standby

        wait_as_standby(descriptor, Path(resolved.arguments[0]) if resolved.script else None)
        ACCOUNT.restart()
    _begin_files()
    _check_connections(Path.cwd(), Path(resolved.arguments[0]) if resolved.script else None)
    # Behind the standby's wait: which task it is follows from its environment.
    arguments = fill_placeholders(resolved.arguments, os.environ)
    if not resolved.script:
        execute(arguments)
    from insitu.base.net.ports import adopt_inherited

    adopt_inherited()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    random.seed(int(os.environ.get("INSITU_SEED", "0")))
    from insitu.base import config

    # Also for a script that never imports insitu.
    config.apply_device_settings()
    for stream in (sys.stdout, sys.stderr):
        # One write for each line: lines of two streams share one pipe and must not be mixed.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    run_script(arguments)


def _begin_files() -> None:
    """Have files of the job's folder written once. Leftovers of an earlier process are removed."""
    import atexit

    from insitu.base.context import context
    from insitu.base.disk.written_once import find_written_files, install_written_once

    # A standby has its task only now.
    install_written_once(context())
    files = find_written_files()
    if files is not None:
        files.clear()
        atexit.register(files.clear)


def _check_connections(folder: Path, script: Path | None) -> None:
    """End the process if the script's tasks would connect without authentication, unasked."""
    from insitu.base.errors import InputError
    from insitu.cluster.task.code_imports import refuse_open_grpc

    try:
        refuse_open_grpc(folder, script, os.environ)
    except InputError as error:
        from insitu.cluster.task.failure import write_failure

        write_failure(error)
        sys.exit(str(error))


def execute(arguments: tuple[str, ...]) -> NoReturn:
    """Replace this process by the program. It can't dump Python stacks, so it ignores the signal for that."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        os.execv(arguments[0], arguments)
    except OSError as error:
        sys.exit(f"{arguments[0]} can't be executed: {error.strerror}")


def run_script(arguments: tuple[str, ...]) -> None:
    """Run the script in this interpreter as `python SCRIPT ARGS...` would."""
    import io

    from insitu.base.measure.time_account import ACCOUNT, SCRIPT
    from insitu.base.process.script_end import begin_script, end_script
    from insitu.cluster.task.lazy_imports import gc_paused, split_imports

    script = arguments[0]
    sys.argv[:] = [os.path.relpath(script), *arguments[1:]]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__dict__["__cached__"] = None
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        with io.open_code(script) as file:
            prologue, rest = split_imports(file.read(), script)
        begin_script()
        try:
            with gc_paused():
                exec(prologue, module.__dict__)
            ACCOUNT.enter(SCRIPT)
            exec(rest, module.__dict__)
        except SystemExit as end:
            if end.code is not None and end.code != 0:
                raise
        end_script()
    except BaseException as error:
        # The first frame is this function's; the user's begin after it, if the script could be read.
        unread = isinstance(error, SyntaxError) and error.filename == script
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ and not unread else None
        from insitu.cluster.task.failure import write_failure

        if isinstance(error, SystemExit):
            if error.code is not None and error.code != 0:
                write_failure(error)
            raise
        write_failure(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    main()
