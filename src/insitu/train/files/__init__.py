"""Files of the cluster's memory, `insitu://`, for Keras. Begin reading with `keras_files.py`."""

from insitu.train.files.keras_files import install_file_access

__all__ = ["install_file_access"]
