"""The PyTorch backend.

Begin reading with `replica.py`.
"""
