"""What is particular to a Keras backend, in a folder for each.

Begin reading with `tensorflow/replica.py`.
"""
