"""Arguments of functions that make data, and the options of data, as `tf.distribute` names them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from insitu.base.errors import InputError


@dataclass(frozen=True, slots=True)
class InputContext:
    """Who reads the data that a function makes, as `tf.distribute.InputContext`.

    Example:
        >>> insitu.InputContext(num_input_pipelines=2, num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
    """

    #: Functions that make data, all tasks together: one in each, or one for each replica.
    num_input_pipelines: int = 1
    #: The number of this one, from 0.
    input_pipeline_id: int = 0
    #: Replicas of all tasks.
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of a replica in a global batch. Raises InputError for parts of a row."""
        if global_batch_size % self.num_replicas_in_sync:
            raise InputError(
                "The global batch size must be divisible by the number of replicas. Received: "
                f"{global_batch_size} rows for {self.num_replicas_in_sync} replicas."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The replica that a value is made for, as `tf.distribute.experimental.ValueContext`."""

    #: The number of the replica among those of all tasks, from 0.
    replica_id_in_sync_group: int = 0
    #: Replicas of all tasks.
    num_replicas_in_sync: int = 1


class InputReplicationMode(enum.Enum):
    """For whom a function makes data, as `tf.distribute.InputReplicationMode`.

    Example:
        >>> mode = insitu.InputReplicationMode.PER_REPLICA
        >>> options = insitu.InputOptions(experimental_replication_mode=mode)
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How data is distributed, as `tf.distribute.InputOptions`.

    Neither the place nor the number of rows read ahead changes a result; insitu decides on both.

    Example:
        >>> insitu.InputOptions().experimental_replication_mode.name
        'PER_WORKER'
    """

    #: Whether batches are copied to devices ahead. insitu decides.
    experimental_fetch_to_device: bool | None = None
    #: Whether `distribute_datasets_from_function` makes data once in a task, or for each replica.
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    #: Whether the data is made on the device. insitu makes it on the host.
    experimental_place_dataset_on_device: bool = False
    #: Batches that are read ahead for each replica. insitu decides.
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_place_dataset_on_device:
            raise InputError(
                "insitu reads data on the host. Received: experimental_place_dataset_on_device=True. Leave "
                "it out."
            )


def is_per_replica(options: object) -> bool:
    """Return whether options of insitu or of TensorFlow ask for data of each replica's own."""
    mode = getattr(options, "experimental_replication_mode", None)
    return getattr(mode, "value", mode) == "PER_REPLICA"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How `strategy.run` compiles, as `tf.distribute.RunOptions`. Options for TPUs alone change no number.

    Example:
        >>> options = insitu.RunOptions()
    """

    #: Whether a TPU program takes batches of any size. Here all do.
    experimental_enable_dynamic_batch_size: bool = True
    #: Whether a TPU program pads shapes to few sizes. Here none is padded.
    experimental_bucketizing_dynamic_shape: bool = False
    #: Options of a TPU program. Refused.
    experimental_xla_options: object = None

    def __post_init__(self) -> None:
        if self.experimental_xla_options is not None:
            raise InputError(
                "strategy.run takes no options of XLA. Received: "
                f"experimental_xla_options={self.experimental_xla_options!r}. Leave it out."
            )
