"""The Keras backends: a folder for each, and the interface by which all else asks them.

Begin reading with `protocol.py`. Nothing but `loading.py` imports the folders.
"""

from insitu.train.backends.loading import active_backend, active_name, load_backend
from insitu.train.backends.protocol import Backend
