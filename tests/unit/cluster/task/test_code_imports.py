"""Code that imports insitu, and what follows for the connections of its tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.cluster.task.code_imports import find_insitu_import, refuse_open_grpc

FAR = ["10.0.0.1:2222", "10.0.0.2:2222"]
NEAR = ["127.0.0.1:2222", "127.0.0.1:2223"]


def environ_of(workers: list[str], **more: str) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {}}), **more}


def test_the_file_that_imports_insitu_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import model")
    (tmp_path / "model.py").write_text("def f():\n    import insitu")
    assert find_insitu_import(tmp_path, [tmp_path / "train.py"]) == tmp_path / "model.py"


@pytest.mark.parametrize("program", [True, False])
def test_tensorflow_alone_connects_hosts_only_when_asked_for(tmp_path: Path, program: bool) -> None:
    (tmp_path / "train.py").write_text("import tensorflow")
    script = None if program else tmp_path / "train.py"
    with pytest.raises(InputError, match=r"TensorFlow's gRPC has no authentication.*10\.0\.0\.1:2222"):
        refuse_open_grpc(tmp_path, script, environ_of(FAR))
    refuse_open_grpc(tmp_path, script, environ_of(FAR, INSITU_ALLOW_UNAUTHENTICATED="1"))
    for environ in (environ_of(NEAR), environ_of(FAR[:1]), {}):
        refuse_open_grpc(tmp_path, script, environ)
    (tmp_path / "train.py").write_text("import insitu")
    refuse_open_grpc(tmp_path, script, environ_of(FAR))
