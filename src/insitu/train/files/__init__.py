"""Files that Keras reads and writes: those of the cluster's memory, `insitu://`, and what all tasks of a job
save. Begin reading with `keras_files.py`."""

from insitu.train.files.keras_files import install_file_access
from insitu.train.files.whole_saves import install_whole_saves
