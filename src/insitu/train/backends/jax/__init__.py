"""The JAX backend.

Begin reading with `replica.py`.
"""
