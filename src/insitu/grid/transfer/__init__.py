"""Moves partitions and rows between the stores of nodes, by Arrow Flight over TLS.

What serves a store is in `serving`. Others fetch from it with `fetch_partition`, and send it the rows of an
import with `row_sending.py`. Begin reading with `fetching.py`, and `requests.py` for what goes
over the wire.
"""

from insitu.grid.transfer.authentication import TokenCheck, derive_credentials
from insitu.grid.transfer.background import AT_ONCE, Task, Tasks
from insitu.grid.transfer.client import PartitionClient, ServerAddress, format_location
from insitu.grid.transfer.fetching import fetch_partition
from insitu.grid.transfer.rate_limit import RateLimit
from insitu.grid.transfer.remote_stores import Fetched, RemoteCheck, RemoteStores, Survey
from insitu.grid.transfer.requests import (
    BUSY,
    CHUNK_BYTES,
    FILES,
    MAX_MESSAGE_BYTES,
    MAX_PARTITION,
    SCHEMA,
    SOURCE_FAILED,
    TEXTS_TOO_LONG,
    ReadRequest,
    RowsRequest,
    check_number,
    check_text,
    decode_message,
    decode_request,
    encode_message,
    make_chunk,
    parse_spec,
)
from insitu.grid.transfer.row_sending import RowSender, StoresElsewhere
