"""A replica without peers, on the PyTorch backend: the model's own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from insitu.train.replica.leaves import pack_batch
from insitu.train.replica.protocol import Logs
from insitu.train.replica.torch import as_tensors


class FusedTorch:
    """See `FusedReplica`."""

    def __init__(self, model: Any, data: Any) -> None:
        self._model = model
        self._structure = data
        self._train = self._compile(model.train_step)
        self._test = self._compile(model.test_step)
        self._predict = self._compile(model.predict_step)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function) if self._model.jit_compile else function
        return compiled

    def train(self, data: Any) -> Logs:
        if not self._model.training:
            self._model.train()
        logs: Logs = self._train(self._pack(data))
        return logs

    def test(self, data: Any) -> Logs:
        self._to_evaluation()
        with torch.no_grad():
            logs: Logs = self._test(self._pack(data))
        return logs

    def predict(self, data: Any) -> Any:
        self._to_evaluation()
        with torch.no_grad():
            outputs = self._predict(self._pack(data))
        return keras.tree.map_structure(lambda tensor: np.array(tensor.detach().cpu().numpy()), outputs)

    def _to_evaluation(self) -> None:
        if self._model.training:
            self._model.eval()

    def _pack(self, data: Any) -> Any:
        return pack_batch(self._structure, as_tensors(data))
