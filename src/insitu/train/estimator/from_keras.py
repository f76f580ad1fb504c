"""`model_to_estimator`: an Estimator of a compiled Keras model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from insitu.base.errors import InputError
from insitu.base.old_arguments import takes_old
from insitu.train.estimator.estimator import Estimator
from insitu.train.estimator.specs import RunConfig
from insitu.train.fit import trainer_of


@takes_old(
    keras_model_path="Pass keras.saving.load_model(PATH, custom_objects)",
    custom_objects="Pass keras.saving.load_model(PATH, custom_objects)",
    checkpoint_format="Leave it out: checkpoints are insitu's",
    metric_names_map="Give the metrics their names in compile",
    export_outputs="Leave it out: an export has the model's outputs",
)
def model_to_estimator(
    keras_model: Any, *, model_dir: str | Path | None = None, config: RunConfig | None = None
) -> Estimator:
    """Return an Estimator that trains a compiled Keras model.

    A model that was compiled in a strategy's scope is trained itself. Another is copied into the scope of
    `config.train_distribute`, with its weights, and compiled there as it was. Predictions are dicts by the
    names of the model's outputs.

    Raises InputError for a model that isn't compiled or built, and, as it is first used, for one that can't
    be copied.
    """
    if not isinstance(keras_model, keras.Model) or not keras_model.compiled or not keras_model.built:
        raise InputError(
            f"model_to_estimator takes a Keras model that is built and compiled. Received: {keras_model!r}. "
            "Give it an Input, and call compile"
        )
    if trainer_of(keras_model) is not None and config is not None and config.train_distribute is not None:
        raise InputError(
            "A model that was compiled in a strategy's scope is trained by that. Received: another in "
            "train_distribute. Leave it out"
        )
    return _KerasEstimator(keras_model, model_dir, config)


class _KerasEstimator(Estimator):
    def __init__(self, keras_model: Any, model_dir: str | Path | None, config: RunConfig | None) -> None:
        super().__init__(lambda features: None, model_dir, config)
        self._given = keras_model
        if trainer_of(keras_model) is not None:
            self._made = keras_model

    needs_labels = False

    def _check_modes(self, *modes: str) -> None:
        """Accept all: a Keras model does what it can."""

    def _make_model(self, features: Any, labels: Any) -> Any:
        given = self._given
        try:
            model = keras.models.clone_model(given)
            model.set_weights(given.get_weights())
            model.compile_from_config(given.get_compile_config())
        except Exception as error:
            raise InputError(
                f"A model is copied by its config. Received: {given.name!r}, and {type(error).__name__}: "
                f"{error}. Register its own classes and functions by "
                "keras.saving.register_keras_serializable, or compile it in a strategy's scope"
            ) from error
        if not model.compiled:
            raise InputError(
                f"A model is compiled by its config. Received: {given.name!r}, which overrides compile. "
                "Compile it in a strategy's scope"
            )
        return model

    def _predict_batch(self, features: Any) -> Any:
        outputs = self._made(features, training=False)
        flat = [keras.ops.convert_to_numpy(output) for output in keras.tree.flatten(outputs)]
        return dict(zip(self._known_keys(), flat, strict=True))

    def _known_keys(self) -> list[str]:
        names = getattr(self._made, "output_names", None)
        if names is None and isinstance(self._made, keras.Sequential):
            names = [self._made.layers[-1].name]
        return list(names or ["output"])
