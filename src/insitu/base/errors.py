"""Every error that insitu raises on purpose, in one tree.

    InsituError
    ├── InputError              the user's input is wrong: the message says what to change
    │   ├── UnknownCache
    │   ├── UnknownJob
    │   ├── JobEnded            the request makes sense only while the job runs
    │   ├── JobRunning          the request makes sense only once the job has ended
    │   ├── CacheExists
    │   ├── SourceError         a source is missing, empty, truncated or of mixed shapes
    │   │   ├── SizeNeeded      images are read with one size
    │   │   └── DamagedImages   some images can't be decoded
    │   ├── PlacementError      the job can't be laid out on the nodes as asked
    │   ├── JobSpecError        the job's folder, command or options can't be used
    │   └── UnknownPosition     a restarted loop must give the position of its data
    ├── GridError               stored data is not as it must be
    │   ├── CorruptPartition
    │   │   └── UnreadablePartition   the system can't read a copy, whose bytes may be right
    │   ├── CorruptCatalog
    │   ├── CorruptManifest     what a store says about a version can't be read
    │   ├── CacheBusy           another process imports into the same cache
    │   ├── TransferError       a partition can't be copied from or to another node
    │   └── StorageFull
    ├── MetadataError           the store of metadata can't do what is asked
    │   ├── CorruptMetadata     its content can't be read, or is another cluster's
    │   ├── MetadataRefused     it refuses this user, certificate or version, or all changes
    │   ├── StoreUnavailable    no answer within the deadline: a change may have been made
    │   │   └── HeadReplaced    another head leads the cluster now: nothing was changed
    │   ├── RevisionCompacted   it doesn't remember changes so far back
    │   └── LeaseEnded          a key was to go with a lease that isn't alive
    ├── ClusterError            the controller or an engine can't do what is asked
    │   ├── TaskFailed          a function that insitu.run has started has failed
    │   └── Unpublished         data that a task has written is on its disk alone when its script ends
    ├── ExchangeError           buffers could not be moved between tasks
    │   ├── JoinTimeout
    │   ├── AuthenticationError
    │   ├── StaleGeneration
    │   └── PeerLost
    ├── ParameterError          parameter servers can't do what is asked
    │   ├── DefinitionMismatch  a worker's variables or tables are others than the servers'
    │   ├── NotFinite           a gradient holds NaN or an infinity
    │   ├── SequenceError       a push that can't come next
    │   ├── VersionMismatch     a server or a worker of another version of insitu
    │   ├── ServerLost          a server died or can't be reached, and no mirror takes over
    │   ├── ServerMoved         another server has this one's data now
    │   └── ServerStalled       no answer within the stall timeout
    ├── MissingLibrary          insitu's compiled code isn't there: the message says how to get it
    └── TrainingError           a strategy, a model or a backend can't continue
        ├── CheckpointError
        ├── CollectiveMismatch  tasks don't make the same calls
        ├── NumericsMismatch     hosts whose backends round differently
        └── Diverged

Each error survives pickling, carries `exit_code` for the command line, and may carry `logs`, the path of
further messages.

Example:
    >>> try:
    ...     insitu.dataset("no-such-cache")
    ... except insitu.errors.UnknownCache as error:
    ...     error.exit_code
    2
"""

from __future__ import annotations

from typing import Any


class InsituError(Exception):
    """Base of all. `logs` names a file or folder that says more, or is None."""

    exit_code = 1
    is_final = False
    """Whether another attempt of the same job would end the same way, so that none is made."""

    def __init__(self, message: str, *, logs: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.logs = logs

    def __str__(self) -> str:
        return f"{self.message} (logs: {self.logs})" if self.logs else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[InsituError], state: dict[str, Any]) -> InsituError:
    error = cls.__new__(cls)
    Exception.__init__(error, state.get("message", ""))
    error.__dict__.update(state)
    return error


class InputError(InsituError):
    """The user's input is wrong."""

    exit_code = 2


class UnknownCache(InputError):
    """No cache has this name."""


class UnknownJob(InputError):
    """No job has this id, or several ids begin with it: `matches` holds those."""

    def __init__(self, message: str, *, matches: tuple[str, ...] = (), logs: str | None = None) -> None:
        super().__init__(message, logs=logs)
        self.matches = matches


class JobEnded(InputError):
    """The request makes sense only while the job runs."""

    exit_code = 3


class JobRunning(InputError):
    """The request makes sense only once the job has ended."""


class CacheExists(InputError):
    """The cache is there already, and `--overwrite` was not given."""


class SourceError(InputError):
    """A source of `insitu import` can't be read as rows of one schema."""


class SizeNeeded(SourceError):
    """Images become rows of one shape, which wasn't given."""

    def __init__(self, found: str, shape: tuple[int, int, int] | None) -> None:
        """`found` says which images, `shape` is their most common one (height, width, channels), None if none
        can be read."""
        self.shape = "x".join(map(str, shape or (224, 224, 3)))
        size = f"most often of {self.shape[: self.shape.rindex('x')]}" if shape else "of unknown sizes"
        super().__init__(
            f"Images become rows of one size, which --images HEIGHTxWIDTHxCHANNELS gives. Received: {found}, "
            f"{size}"
        )


class DamagedImages(SourceError):
    """Images can't be decoded. `problems` says of each what it is and what is wrong."""

    MOST_NAMED = 20

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__(f"Images must be whole. Received: {self.describe(problems)}")

    @classmethod
    def describe(cls, problems: tuple[str, ...]) -> str:
        """Return how many there are, and the first ones."""
        named = "; ".join(problems[: cls.MOST_NAMED])
        more = len(problems) - cls.MOST_NAMED
        return f"{len(problems):,} damaged: {named}{f'; and {more:,} more' if more > 0 else ''}"


class PlacementError(InputError):
    """The job can't be laid out on the nodes as asked."""


class JobSpecError(InputError):
    """The job's folder, command or options can't be used."""


class UnknownPosition(InputError):
    """A restarted loop continues from a checkpoint of its own, and nothing says where its data stands."""

    is_final = True


class GridError(InsituError):
    """Stored data is not as it must be."""


class CorruptPartition(GridError):
    """A partition's bytes differ from what was written."""

    why = ""
    """The reason alone, without the file and what to do; empty if that isn't known."""


class UnreadablePartition(CorruptPartition):
    """The system can't read a copy of a partition now. Its bytes may be right, so it isn't replaced."""


class CorruptCatalog(GridError):
    """The catalogue of caches can't be read."""


class CorruptManifest(GridError):
    """The file that says what a store holds of a version can't be read."""


class TransferError(GridError):
    """A partition can't be copied from or to another node."""


class CacheBusy(GridError):
    """Another process is importing into the same cache."""


class StorageFull(GridError):
    """No room is left on the device of a store or a checkpoint."""


class MetadataError(InsituError):
    """The store of metadata can't do what is asked. Nothing was changed, unless a subclass says otherwise."""


class CorruptMetadata(MetadataError):
    """The content of the store of metadata can't be read, or is another cluster's."""


class MetadataRefused(MetadataError):
    """The store of metadata refuses this user, certificate or version, or all changes."""


class StoreUnavailable(MetadataError):
    """The store of metadata gave no answer within the deadline. A transaction may have been made: asking
    again with its id says so."""


class HeadReplaced(StoreUnavailable):
    """Another head leads the cluster now, or none does. Nothing was changed: ask the other one."""


class RevisionCompacted(MetadataError):
    """The store of metadata doesn't remember changes so far back: read all again."""


class LeaseEnded(MetadataError):
    """A key was to go with a lease that isn't alive. `lease` is its id."""

    def __init__(self, message: str, *, lease: int = 0, logs: str | None = None) -> None:
        super().__init__(message, logs=logs)
        self.lease = lease


class ClusterError(InsituError):
    """The controller or an engine can't do what is asked."""


class TaskFailed(ClusterError):
    """A function that `insitu.run` has started has failed. `job_id` is its job, `task` the one that failed,
    such as worker:1, and `traceback` its text; both are "" if none is to blame or was killed."""

    def __init__(self, message: str, *, job_id: str, task: str, traceback: str, logs: str) -> None:
        super().__init__(message, logs=logs)
        self.job_id = job_id
        self.task = task
        self.traceback = traceback


class Unpublished(ClusterError):
    """Data that a task has written to files of the cluster is on its disk alone when its script ends."""

    is_final = True


class ExchangeError(InsituError):
    """Buffers could not be moved between tasks."""


class JoinTimeout(ExchangeError):
    """Some peers did not join before the deadline. `missing` holds their ranks."""

    def __init__(self, message: str, *, missing: tuple[int, ...] = (), logs: str | None = None) -> None:
        super().__init__(message, logs=logs)
        self.missing = missing


class AuthenticationError(ExchangeError):
    """A peer did not prove that it knows the job's secret."""


class StaleGeneration(ExchangeError):
    """A message of a generation that has ended."""


class PeerLost(ExchangeError):
    """A peer died, left, or made no progress within the stall timeout.

    `rank` and `task` name the peer, `operation` and `sequence` the collective that was under way (its
    number in this group, from 0), `last_completed` the number of the last one that every buffer of this
    process has wholly been through (-1: none).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        task: str,
        operation: str,
        sequence: int,
        last_completed: int,
        logs: str | None = None,
    ) -> None:
        super().__init__(message, logs=logs)
        self.rank = rank
        self.task = task
        self.operation = operation
        self.sequence = sequence
        self.last_completed = last_completed


class ParameterError(InsituError):
    """Parameter servers can't do what is asked."""


class DefinitionMismatch(ParameterError):
    """A worker's variables or tables are others than those that the servers hold."""


class NotFinite(ParameterError):
    """A gradient that was pushed holds NaN or an infinity; the message names the place."""


class SequenceError(ParameterError):
    """A push that can't come next: of a sequence after a gap, or of a step that hasn't come."""


class VersionMismatch(ParameterError):
    """A server or a worker of another version of insitu."""


class ServerLost(ParameterError):
    """A server died or can't be reached, and no mirror takes over. `server` is its index."""

    def __init__(self, message: str, *, server: int = -1, logs: str | None = None) -> None:
        super().__init__(message, logs=logs)
        self.server = server


class ServerMoved(ParameterError):
    """Another server has this one's data now; clients go there by themselves."""


class ServerStalled(ParameterError):
    """A server gave no answer within the stall timeout; the message says what it waits for."""


class MissingLibrary(InsituError):
    """insitu's compiled code isn't there, or can't be loaded."""

    is_final = True


class TrainingError(InsituError):
    """A strategy, a model or a backend can't continue."""


class CheckpointError(TrainingError):
    """A checkpoint can't be written, read or trusted."""


class CollectiveMismatch(TrainingError):
    """A call that all tasks must make was made by some of them only."""

    is_final = True


class NumericsMismatch(TrainingError):
    """The backends of two hosts give other bits for the same sums, so replicas wouldn't stay equal."""

    is_final = True


class Diverged(TrainingError):
    """Replicas that must be equal are not."""
