"""The ground of all rooms: values, errors, names on disk, settings. Begin reading with `spec.py`.

Its modules are imported one by one. `disk`, `net`, `process` and `measure` are what they need of the machine.
"""
