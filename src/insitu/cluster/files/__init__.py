"""The file system in the memory of a cluster's nodes, `insitu://VOLUME/PATH`.

The names of a volume are decided by one node at a time, the first of a fixed order that can be reached. It
brings each change to others before it answers. Blocks lie on as many nodes as the file is to have copies.
Begin reading with `service.py`, which runs on the nodes, then `client.py`.
"""

from insitu.cluster.files.client import FileClient
from insitu.cluster.files.peers import LocalPeers, Peer, Peers, RemotePeers, View, describe_error
from insitu.cluster.files.repairing import OrphanWatch, RepairReport, repair_volume
from insitu.cluster.files.service import FileService

__all__ = [
    "FileClient",
    "FileService",
    "LocalPeers",
    "OrphanWatch",
    "Peer",
    "Peers",
    "RemotePeers",
    "RepairReport",
    "View",
    "describe_error",
    "repair_volume",
]
