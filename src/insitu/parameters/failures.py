"""Answers requests that failed."""

from __future__ import annotations

from insitu.errors import InputError, InsituError
from insitu.parameters.connection import Connection
from insitu.parameters.rules import Message, make_failure


def fail(connection: Connection, message: Message, error: Exception) -> None:
    """Answer a request with its error."""
    connection.enqueue(make_failure(message.request, describe_bad_request(error)))


def describe_bad_request(error: Exception) -> InsituError:
    """Return the error of a request: its own, or one that says that its fields are wrong."""
    if isinstance(error, InsituError):
        return error
    return InputError(
        f"A request must have the fields of its operation. Received: {type(error).__name__}: {error}. "
        "Use only insitu's own clients"
    )
