"""Moves partitions and rows between the stores of nodes, by Arrow Flight over TLS.

A node serves its store with `PartitionServer`; others fetch from it with `fetch_partition`, and send it the
rows of an import with `row_sending.py`. Begin reading with `fetching.py`, and `requests.py` for what goes
over the wire.
"""

from insitu.grid.transfer.client import PartitionClient, ServerAddress
from insitu.grid.transfer.fetching import fetch_partition
from insitu.grid.transfer.rate_limit import RateLimit
from insitu.grid.transfer.remote_stores import Fetched, RemoteCheck, RemoteStores, Survey
from insitu.grid.transfer.server import PartitionServer

__all__ = [
    "Fetched",
    "PartitionClient",
    "PartitionServer",
    "RateLimit",
    "RemoteCheck",
    "RemoteStores",
    "ServerAddress",
    "Survey",
    "fetch_partition",
]
