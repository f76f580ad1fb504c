"""The TensorFlow backend.

Begin reading with `replica.py`.
"""
