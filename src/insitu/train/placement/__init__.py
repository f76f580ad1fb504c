"""Places the layers of one model on several devices.

Begin reading with `layers.py`.
"""

from insitu.train.placement.layers import LayerwiseStep, place_in_loop, place_layers
from insitu.train.placement.variables import making_layers_on

__all__ = [
    "LayerwiseStep",
    "making_layers_on",
    "place_in_loop",
    "place_layers",
]
