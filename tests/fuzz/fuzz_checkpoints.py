"""Coverage-guided fuzzing of what is read back of checkpoints and jobs. A run ends by the first finding.

    pip install --target /tmp/atheris atheris
    export PYTHONPATH=/tmp/atheris:src
    .venv/bin/python tests/fuzz/fuzz_checkpoints.py checkpoint -max_total_time=1200

The first argument is what is read: checkpoint, servers (a checkpoint of a parameter server), roster, journal
or lock. The rest goes to libFuzzer. A finding is any exception but those that the readers name.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import atheris

os.environ.setdefault("KERAS_BACKEND", "numpy")
FOLDER = Path(tempfile.mkdtemp(prefix="insitu-fuzz-"))
os.environ["INSITU_HOME"] = str(FOLDER / "home")

with atheris.instrument_imports(include=["insitu"]):
    from insitu.base.disk.signatures import sign
    from insitu.base.errors import CheckpointError, ClusterError
    from insitu.base.roster import Member, Roster, read_roster, write_roster
    from insitu.base.spec import NodeId, TaskId, TaskSpec
    from insitu.cluster.decide import new_job
    from insitu.cluster.job_files import Journal, find_other_host, read_controller, read_supervisor

KEY = b"k" * 32


def read_checkpoint() -> tuple[Callable[[bytes], object], bytes]:
    """Everything is signed: the reader behind the signature is what is looked at."""
    import numpy as np

    from insitu.train.checkpoint.store import Checkpoint, CheckpointStore

    store = CheckpointStore(FOLDER / "checkpoints", 0, key=KEY)
    values = {"w": np.arange(6.0).reshape(2, 3), "text": np.array(["a", "b"])}
    folder = Path(store.save(Checkpoint(1, 2, values, {"callbacks": {"X 0": {"best": (1.5, None)}}})))
    state = json.loads((folder / "state.json").read_bytes())["state"]

    def read(data: bytes) -> None:
        try:
            decoded = json.loads(data)
        except (ValueError, RecursionError):
            return
        (folder / "state.json").write_bytes(sign(decoded, KEY))
        store.load_latest()

    return read, state.encode()


def read_servers_checkpoint() -> tuple[Callable[[bytes], object], bytes]:
    """As above: behind the signature, which all of the state is behind."""
    import numpy as np

    from insitu.parameters import Table, checkpoints, make_updater, snapshots
    from insitu.parameters.rules import ConsistencyPolicy, PushEvent
    from insitu.parameters.server_state import ServerState

    def make_state() -> ServerState:
        return ServerState(0, ConsistencyPolicy("async", 1), nan="refuse", make_updater=make_updater)

    state = make_state()
    state.define_table(Table("t", 2))
    state.push_rows("t", PushEvent(0, 0, 0, 1), np.array([7]), np.ones((1, 2), "f4"), 0.0)
    folder = checkpoints.server_folder(FOLDER, 0)
    checkpoints.write(folder, 1, snapshots.begin_live_snapshot(state, {}), KEY)
    snapshots.end_live_snapshot(state)
    path = folder / "checkpoint-00000001" / "state.json"
    text = json.loads(path.read_bytes())["state"]

    def read(data: bytes) -> None:
        try:
            decoded = json.loads(data)
        except (ValueError, RecursionError):
            return
        path.write_bytes(sign(decoded, KEY))
        checkpoints.read_newest(FOLDER, 0, KEY)

    return read, text.encode()


def read_rosters() -> tuple[Callable[[bytes], object], bytes]:
    path = FOLDER / "roster.json"
    write_roster(path, Roster(3, (Member(TaskId("worker", 0), 1, "h:1", (0,)),)))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_roster(path)

    return read, path.read_bytes()


def read_journal() -> tuple[Callable[[bytes], object], bytes]:
    journal = Journal(FOLDER / "journal.sqlite")
    journal.create(new_job([TaskSpec(TaskId("worker", 0), NodeId("node-0"))], 1))
    with closing(sqlite3.connect(journal.path)) as connection:
        ((state,),) = connection.execute("SELECT state FROM entries")

    def read(data: bytes) -> None:
        text = data.decode(errors="replace")
        with closing(sqlite3.connect(journal.path)) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("UPDATE entries SET state = ?, actions = ?", (text, text))
        for look in (journal.state, journal.entries, lambda: journal.find_reply("t")):
            with suppress(ClusterError):
                look()

    return read, state.encode()


def read_lock() -> tuple[Callable[[bytes], object], bytes]:
    path = FOLDER / "controller.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_controller(path)
        read_supervisor(path)
        find_other_host(path)

    return read, b'{"pid": 1, "started": 1.5, "start": 7, "supervisor": [1, 7], "host": "h"}'


READERS = {
    "checkpoint": read_checkpoint,
    "servers": read_servers_checkpoint,
    "roster": read_rosters,
    "journal": read_journal,
    "lock": read_lock,
}


def main() -> None:
    read, example = READERS[sys.argv.pop(1)]()
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    (corpus / "example").write_bytes(example)

    def read_one(data: bytes) -> None:
        with suppress(CheckpointError):
            read(data)

    atheris.Setup([sys.argv[0], str(corpus), "-rss_limit_mb=2048", "-max_len=4096", *sys.argv[1:]], read_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
