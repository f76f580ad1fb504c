"""A SavedModel is a program. One that uses files is refused unless somebody trusts it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.extensions.exports import formats, load_export

tf = pytest.importorskip("tensorflow")


class Model(tf.Module):  # type: ignore[misc]
    """Answers by what a function makes of its input."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = tf.Variable(2.0)
        self._act = act

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])  # type: ignore[untyped-decorator]
    def call(self, x: Any) -> dict[str, Any]:
        return {"y": self._act(x) * self.weight}


def save(act: Callable[[Any], Any], path: Path) -> Path:
    model = Model(act)
    tf.saved_model.save(model, str(path), signatures={"serving_default": model.call})
    return path


def read(x: Any) -> Any:
    return x + tf.cast(tf.strings.length(tf.io.read_file("/etc/hostname")), tf.float32)


def branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: read(x), lambda: x)


def lines(x: Any) -> Any:
    return tf.data.TextLineDataset("/etc/hostname").reduce(x, lambda total, line: total + 1.0)


def python(x: Any) -> Any:
    return tf.ensure_shape(tf.numpy_function(lambda array: array, [x], tf.float32), [None])


def records(x: Any) -> Any:
    read = tf.raw_ops.RecordInput(file_pattern="/etc/hostname", batch_size=1)
    return x + tf.cast(tf.strings.length(read[0]), tf.float32)


def hidden(x: Any) -> Any:
    with tf.init_scope():
        lines = tf.data.TextLineDataset("/etc/hostname")
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=lines._variant_tensor).numpy()
    found = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(graph))
    return x + tf.cast(tf.raw_ops.DatasetCardinality(input_dataset=found), tf.float32)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (read, "ReadFile"),
        (branch, "ReadFile"),
        (lines, "TextLineDataset"),
        (python, "PyFunc"),
        (lambda x: x + tf.cast(tf.size(tf.io.matching_files("/root/*")), tf.float32), "MatchingFiles"),
    ],
)
def test_what_uses_files_is_refused_unless_it_is_trusted(
    tmp_path: Path, act: Callable[[Any], Any], named: str
) -> None:
    """One prediction wrote a file and returned another."""
    path = save(act, tmp_path / "model")
    with pytest.raises(InputError, match=f"{named}.*--trust"):
        load_export(path)
    if named != "PyFunc":  # calls the Python of the process that has saved it
        assert load_export(path, trust=True).predict({"x": np.ones(3, "float32")})["y"].shape == (3,)


HARMLESS = {
    *(
        "BoostedTreesExampleDebugOutputs",
        "ExperimentalDirectedInterleaveDataset",
        "DirectedInterleaveDataset",
    ),
    *(
        "TensorSliceDataset",
        "CTCBeamSearchDecoder",
        "XlaHostCompute",
        "Copy",
        "CopyHost",
        "DebugGradientIdentity",
    ),
    *(
        "ParseExampleV2",
        "ParseSingleSequenceExample",
        "ParseSequenceExample",
        "ParseSequenceExampleV2",
        "VarHandleOp",
        "GraphDefVersion",
    ),
    *("DebugGradientRefIdentity", "RequiresOlderGraphVersion", "DatasetToGraph", "DatasetToGraphV2"),
}
"""Operations that are called like what touches files, or have such arguments, and touch none."""


def test_each_operation_that_names_files_or_other_graphs_is_refused() -> None:
    """A new version of TensorFlow may have further ones: then this says which to look at."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    known = op_def_pb2.OpList()
    known.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    telling = re.compile(r"file|path|dir(?!ection)|url|address|graph|descriptor|debug", re.IGNORECASE)
    left = {
        operation.name
        for operation in known.op
        if not formats._REFUSED.fullmatch(operation.name) and not operation.name.startswith("_")
        for name in (operation.name, *(each.name for each in (*operation.input_arg, *operation.attr)))
        if telling.search(name)
    }
    assert len(known.op) > 1000 and left - HARMLESS == set()


@pytest.mark.parametrize(("act", "named"), [(records, "RecordInput"), (hidden, "DatasetFromGraph")])
def test_what_reads_files_under_another_name_is_refused(
    tmp_path: Path, act: Callable[[Any], Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        load_export(save(act, tmp_path / "model"))


def test_what_writes_a_file_writes_none(tmp_path: Path) -> None:
    target = tmp_path / "written"

    def write(x: Any) -> Any:
        tf.io.write_file(str(target), "x")
        return x

    path = save(write, tmp_path / "model")
    with pytest.raises(InputError, match="WriteFile"):
        load_export(path)
    assert not target.exists()


def test_what_only_computes_is_taken(tmp_path: Path) -> None:
    served = load_export(save(tf.math.sqrt, tmp_path / "model"))
    assert served.predict({"x": np.array([4.0], "float32")})["y"].tolist() == [4.0]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="texts are an input on TensorFlow alone")
def test_models_of_keras_are_taken(tmp_path: Path) -> None:
    inputs = keras.Input((), dtype="string")
    hidden = keras.layers.StringLookup(vocabulary=["yes", "no"], output_mode="one_hot")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(hidden)))
    model.export(tmp_path / "model", verbose=False)
    assert load_export(tmp_path / "model").call([np.array(["yes"], object)])[0].shape == (1, 1)
