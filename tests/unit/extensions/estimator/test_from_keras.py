"""An estimator of a Keras model trains as the model does."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from models import Batches, image_model, image_rows, in_shards, same_bits, weights

from insitu import estimator as est
from insitu.base.errors import InputError
from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy

# Keras, as it makes arrays
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = image_rows()


def test_a_copy_is_trained_as_the_model_would_be(tmp_path: Path) -> None:
    plain = image_model(dropout=0)
    before = [w.copy() for w in weights(plain)]
    config = est.RunConfig(train_distribute=MultiWorkerMirroredStrategy(context=in_shards((0,), 1)))
    model = est.model_to_estimator(plain, model_dir=tmp_path, config=config).train(Batches, max_steps=7)
    assert same_bits(weights(plain), before)
    plain.fit(Batches(), shuffle=False, verbose=0)
    for one, other in zip(weights(model.model), weights(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    scores = model.evaluate(lambda: (X, Y))
    expected = plain.evaluate(X, Y, verbose=0, return_dict=True)
    assert scores == pytest.approx({**expected, "global_step": 7}, rel=1e-4)
    (name,) = {key for row in model.predict(lambda: X) for key in row}
    found = np.stack([row[name] for row in model.predict(lambda: X)])
    np.testing.assert_allclose(found, plain.predict(X, verbose=0), atol=1e-5)


def test_a_model_of_a_scope_is_trained_itself(tmp_path: Path) -> None:
    with OneDeviceStrategy().scope():
        given = image_model()
    assert est.model_to_estimator(given, model_dir=tmp_path).train(Batches, max_steps=2).model is given
    with pytest.raises(InputError, match="is trained by that"):
        est.model_to_estimator(given, config=est.RunConfig(train_distribute=OneDeviceStrategy()))


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(InputError, match="built and compiled"):
        est.model_to_estimator(keras.Sequential([keras.Input((1,))]))
