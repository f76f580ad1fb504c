"""Devices of variables are printed where that is asked for."""

from __future__ import annotations

import keras

from insitu import config
from insitu.train.devices.setup import log_variables


def test_variables_are_printed_only_if_asked_for(monkeypatch, capsys):
    variable = keras.Variable(1.0, name="w")
    log_variables([variable])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(config, "settings", lambda: config.DeviceSettings(log_placement=True))
    log_variables([variable])
    assert "[insitu] variable w: " in capsys.readouterr().err
