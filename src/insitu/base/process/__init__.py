"""Processes, and what happens when they import modules and end. Begin reading with `processes.py`."""
