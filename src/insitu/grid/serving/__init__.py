"""The server of a node's store, for other nodes. Begin reading with `server.py`."""

from insitu.grid.serving.server import PartitionServer
from insitu.grid.serving.store_actions import refuse_replaced
