"""Addresses, ports and certificates. Begin reading with `ports.py`."""
