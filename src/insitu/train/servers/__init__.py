"""Keras on parameter servers: what a worker sends, what a server applies."""
