"""A table on the servers, as an Embedding reads and writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.parameters import Client
from insitu.train.parameter_server.layers import Embedding
from insitu.train.parameter_server.lookup import Keys


class ServerTable:
    """See `insitu.train.parameter_server.layers.EmbeddingStorage`."""

    def __init__(
        self, client: Client, layer: Embedding, begin: Callable[[str, Keys, NDArray[Any]], None]
    ) -> None:
        self._client = client
        self._begin = begin
        self._name = layer.name
        self._width = layer.output_dim

    def pull(self, keys: Keys) -> NDArray[Any]:
        return self._client.pull_rows(self._name, keys).result()

    def read_all(self) -> tuple[Keys, NDArray[Any]]:
        blocks = list(self._client.read_rows(self._name))
        keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
        rows = np.concatenate([np.empty((0, self._width), np.float32), *(rows for _, rows in blocks)])
        order = np.argsort(keys)
        return keys[order], rows[order]

    def begin(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._begin(self._name, keys, rows)

    def assign(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._client.load_rows(self._name, keys, rows).result()
