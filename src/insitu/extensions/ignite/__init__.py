"""Apache Ignite as a connector: its thin protocol, binary objects as columns, a cache as a table.

The core finds `connector.py` by an entry point. Begin reading with `source.py`, a cache as rows in the order
of their keys. `protocol.py`, `rows.py`, `objects.py`, `values.py`, and `fields.py` are pure: bytes in,
columns out. Only `connection.py` has a socket.
"""
