"""Goes on when a task is lost: units of work that all tasks do together, and who takes part.

Begin reading with `lockstep.py`.
"""

from insitu.train.elastic.call_log import CallCounter, CallLog, Resumable
from insitu.train.elastic.divergence import Fingerprint, check_equal
from insitu.train.elastic.lockstep import (
    CallRecord,
    Lockstep,
    ResumePoint,
    RetryStep,
    Units,
    Work,
    check_same_call,
    find_place,
    refuse_without,
)
from insitu.train.elastic.membership import CHECK_EVERY, Membership, SynchronousMembership
from insitu.train.elastic.position import (
    BEGIN,
    CALL,
    CUSTOM_LOOP,
    END,
    EPOCH,
    LOOP,
    PREDICT,
    RESTORE,
    SETUP,
    TEST,
    TRAIN,
    Kind,
    LoopPosition,
)
from insitu.train.elastic.progress_reporter import ProgressReporter
from insitu.train.elastic.side_sampler import SideSampler
