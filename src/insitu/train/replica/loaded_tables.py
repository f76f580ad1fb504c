"""Tables of embeddings that a model was loaded with, if no servers hold them."""

from __future__ import annotations

from typing import Any

from insitu.train.replica.update_count import inner_optimizer


def mark_loaded_table(variable: Any) -> None:
    """Note that a variable was made for the rows of a saved table."""
    variable.insitu_loaded = True


def renew_optimizer(model: Any) -> bool:
    """Replace the optimizer of `model` by a new one of the same configuration, if it doesn't know a loaded
    table. Return whether the model has any.

    Keras builds the optimizer of a saved model before it loads the layers, which then find their tables.
    """
    tables = [v for v in model.trainable_variables if getattr(v, "insitu_loaded", False)]
    optimizer = getattr(model, "optimizer", None)
    if not tables or optimizer is None or not inner_optimizer(optimizer).built:
        return bool(tables)
    known = {id(variable) for variable in inner_optimizer(optimizer)._trainable_variables}
    if any(id(variable) not in known for variable in tables):
        replace_optimizer(model)
    return True


def replace_optimizer(model: Any) -> None:
    """Replace the optimizer of `model` by a new one of the same configuration."""
    model.optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
