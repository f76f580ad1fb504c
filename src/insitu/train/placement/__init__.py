"""Placements the layers of one model on several devices.

Begin reading with `layers.py`.
"""

from insitu.train.placement.layers import PlacedLayersStep, place_layers, place_loop_layers
from insitu.train.placement.variables import Placements, find_device, place_new_variables
