"""A model whose layers lie on several devices."""

from __future__ import annotations

from insitu.train.layerwise.making import making_layers_on
from insitu.train.layerwise.placing import LayerwiseStep, place_in_loop, place_layers

__all__ = ["LayerwiseStep", "making_layers_on", "place_in_loop", "place_layers"]
