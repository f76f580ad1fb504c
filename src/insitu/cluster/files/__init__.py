"""The file system in the memory of a cluster's nodes, `insitu://VOLUME/PATH`.

Names are in the metadata store, which the head owns; blocks are on as many nodes as the file has copies.
Begin reading with `client.py`, which writes blocks and then a name, then `names_client.py`. The behaviour of
tasks while the head is unreachable is in `task_client.py`.
"""

from insitu.cluster.files.asking import Suspects
from insitu.cluster.files.client import FileClient, ViewCache
from insitu.cluster.files.manifest_survey import FoundFile, NamesReport, drop_replaced, survey_names
from insitu.cluster.files.names_client import LocalNames, Names, NamesAway, RemoteNames
from insitu.cluster.files.names_guard import NamesGuard
from insitu.cluster.files.peers import Fields, LocalPeers, Peer, Peers, RemotePeers, View, describe_error
from insitu.cluster.files.publisher import Publisher
from insitu.cluster.files.repairing import Repairer, RepairReport
from insitu.cluster.files.service import NAME_KINDS, NameService
from insitu.cluster.files.task_client import TaskFileClient
from insitu.cluster.files.upkeep import FileUpkeep
from insitu.cluster.files.waiting_folder import WaitingFolder
