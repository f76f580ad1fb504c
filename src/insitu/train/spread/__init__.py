"""Steps over several devices of one process. Door of the room; see `tensorflow.py` and `by_device.py`."""
