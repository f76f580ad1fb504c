"""Goes on when a task is lost: units of work that all tasks do together, and who takes part.

Begin reading with `lockstep.py`.
"""

from insitu.train.elastic.call_log import Session
from insitu.train.elastic.divergence import Fingerprint, check_equal
from insitu.train.elastic.lockstep import SETUP, Again, Key, Lockstep, Work
from insitu.train.elastic.membership import CHECK_EVERY, Membership, Telling

__all__ = [
    "CHECK_EVERY",
    "SETUP",
    "Again",
    "Fingerprint",
    "Key",
    "Lockstep",
    "Membership",
    "Session",
    "Telling",
    "Work",
    "check_equal",
]
