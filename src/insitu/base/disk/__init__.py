"""Files: written whole, guarded, readable by whom they are for. Begin reading with `durable.py`."""
