"""All that insitu asks of a Keras backend.

A backend is a folder beside this file, named as Keras names it. Its door has a `Backend`, BACKEND. Methods
that raise NotImplementedError are what any backend must do. The others have a default, which suits one whose
steps run eagerly. This room is below those of features: their types are Any here, and docstrings name their
protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.config import DeviceSettings


class Backend:
    """One backend, without a state. The modules of its folder, and its library, are imported on first use."""

    # Variables

    has_wide_integers = True
    """Whether integers of 64 bits keep their size."""

    def view(self, variable: Any) -> NDArray[Any]:
        """Return a variable's value, without a copy if it is on the host: valid until the next update."""
        # Not by convert_to_numpy: for JAX it uses a call that future NumPy versions refuse.
        return np.asarray(variable.value)

    def lend(self, array: NDArray[Any]) -> Any:
        """Return what a variable is assigned in place of an array, whose memory it may use from now on."""
        return array

    def identify_value(self, variable: Any) -> Any:
        """Return an object, or a tuple, that another value of the variable differs in; None: only reading
        shows whether it has changed."""
        return None

    def raw_variable(self, variable: Any) -> Any:
        """Return what is assigned to if a Keras variable is."""
        return variable

    def raw_variable_types(self) -> tuple[type, ...]:
        """Return the library's classes of variables, if Keras' variables are assigned by their methods."""
        return ()

    def is_tracing(self) -> bool:
        """Return True while a function is traced, in which an assignment changes nothing yet."""
        from keras.src.backend.common.stateless_scope import in_stateless_scope

        return bool(in_stateless_scope())

    def compile_once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, made of Keras' operations, in the form in which one call takes least time."""
        return function

    # Steps of Keras' fit, evaluate and predict

    builds_by_data = True
    """Whether Keras builds a model by an iteration of the data."""
    keeps_step_functions = False
    """Whether Keras keeps the step that it made once, whatever a model trains later."""
    trains_as_compiled = False
    """Whether Keras trains only the variables that were trainable when a model was compiled."""

    def check_delegated(self) -> None:
        """Raise TrainingError if Keras would do a call in another way than a strategy says."""

    def keras_methods(self, trainer_of: Callable[[Any], Any]) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions that make new methods of `keras.Model` of the old ones, by their names.
        `trainer_of` returns the trainer of a model, or None."""
        return {}

    def wrap_train_function(self, run: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return `run`, a function of an iterable of steps, in the form in which Keras calls its train and
        test functions."""
        return run

    def make_replica(self, model: Any, data: Any, plan: Any = None) -> Any:
        """Return a `Replica` of `model`. `data` is a batch, for its structure and dtypes; `plan` says how
        steps combine."""
        raise NotImplementedError

    def make_fused_replica(self, model: Any, data: Any) -> Any:
        """Return a `FusedReplica`: one without peers."""
        raise NotImplementedError

    def add_up_repeated_rows(self, model: Any) -> AbstractContextManager[None]:
        """Return a scope in which Keras' own steps of `model` give each row of a sparse gradient to the
        optimizer once, as replicas do."""
        return nullcontext()

    # Probes, which find out how a model's steps combine

    def make_probe_steps(self, model: Any, trainable: Any) -> Any:
        """Return the `Steps` of a probe."""
        raise NotImplementedError

    def random_functions(
        self, of_keras: Mapping[str, Callable[..., Any]]
    ) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        """Yield (module, name, what to call instead) for the library's functions that draw random numbers.
        `of_keras` are those that replace the functions of Keras."""
        return ()

    def loses_device_by_bad_index(self) -> bool:
        """Return True if an index that is out of range would end all work with the device."""
        return False

    # Several devices

    has_one_function_for_all = False
    """Whether what `make_device_replica` and its like return, in the only process, does whole steps of all
    devices, as `DeviceReplicas` and `LoopDeviceReplicas` do."""
    meshes: Any = None
    """A module that trains by one program over a mesh of devices, with the names of `jax/spmd`; None: the
    backend has no such programs."""

    def make_device_replica(
        self, model: Any, data: Any, devices: Sequence[Any], shards: Sequence[int], home: Any, plan: Any
    ) -> Any:
        """Return a `MultiDeviceReplica`, on each of `devices` for one of `shards`. Each device has its own
        copy of the variables or, with a `home`, all read those on `home`."""
        raise NotImplementedError

    def make_device_mover(self) -> Any:
        """Return a `DeviceMover`."""
        raise NotImplementedError

    # Custom loops

    compiles_loops = False
    """Whether the step of a custom loop is compiled by XLA."""
    has_numbers_in_steps = False
    """Whether a plain number that a step returns may differ from step to step. Elsewhere it is a part of the
    trace."""

    def prepare_scripts(self) -> None:
        """Prepare the library's functions that scripts use around and in their steps. Done once."""

    def leave_graph(self, name: str) -> None:
        """Leave the graph that a function of the script is being compiled to, if any: what the public
        function `name` does can't be part of it. Called before anything is changed.

        Raises TrainingError if the function can't be run as Python instead.
        """

    def trace_step(self, model: Any, example: list[Any]) -> list[Any]:
        """Run the step of a `StepModel` without effect on arrays like `example`, so that it knows the
        variables that the step touches. Returns those of its metrics on which the outputs depend."""
        raise NotImplementedError

    def make_loop_replica(self, model: Any, example: list[Any]) -> Any:
        """Return a `LoopReplica` of a `StepModel` that has been traced."""
        raise NotImplementedError

    def make_device_loop_replica(
        self, model: Any, example: list[Any], devices: Sequence[Any], shards: Sequence[int], home: Any
    ) -> Any:
        """Return a `MultiDeviceLoopReplica`, as `make_device_replica` does."""
        raise NotImplementedError

    def make_spec(self, shape: Sequence[int | None], dtype: str) -> Any:
        """Return what describes an array to scripts."""
        import keras

        return keras.KerasTensor(shape, dtype)

    def make_trackable(self, data: type[Any]) -> type[Any]:
        """Return a class of positioned data of which the library takes objects into its own checkpoints."""
        return data

    def as_batch(self, leaf: Any) -> Any:
        """Return an array of a batch as scripts expect it."""
        return leaf

    def out_of_range_error(self) -> Exception:
        """Return the error that the library's iterators raise at their end."""
        return StopIteration()

    def record_summaries(self, replica_id: Any, first: int) -> AbstractContextManager[Any]:
        """Return a scope in which the library's summaries are written for replica number `first` alone, as
        with `tf.distribute`. `replica_id` is that of the replica that runs, a tensor."""
        return nullcontext()

    # Parameter servers

    def compile_update(self, optimizers: Sequence[Any], clip: Callable[[Any], Any], *, jit: bool) -> Any:
        """Return a compiled `Update` of the pieces of `optimizers`; None: it runs eagerly. `clip` returns the
        gradients as their global norm allows."""
        return None

    # Devices

    def list_devices(self) -> list[Any]:
        """Return each `Device`. Starts the backend."""
        raise NotImplementedError

    def device_handle(self, device: Any) -> Any:
        """Return the library's own object for a `Device`."""
        raise NotImplementedError

    def device_scope_name(self, device: Any) -> str:
        """Return what `keras.device` takes for a `Device`."""
        name: str = device.name
        return name

    def set_up_devices(self, settings: DeviceSettings) -> None:
        """Set up the library, which is imported. Raises InputError if it has started with other settings, or
        can't apply these."""
        raise NotImplementedError

    def has_started(self) -> bool:
        """Return True once the library has chosen its devices."""
        return False

    def start_tpu(self, tpu: Any) -> None:
        """Start the TPU of which a user has given the name, or a resolver. Raises TrainingError, or whatever
        the library does."""
        raise NotImplementedError


class _FromFolder:
    """What a module in the folder of a backend has; the module is imported on first use."""

    def __init__(self, place: str) -> None:
        self._module, _, self._name = place.partition(":")

    def __get__(self, backend: Backend, owner: type[Backend]) -> Any:
        module = import_module(f"{owner.__module__}.{self._module}")
        return getattr(module, self._name) if self._name else module


def from_folder(place: str) -> Any:
    """Return the method of a backend that is the function or class `NAME` of its module, by `MODULE:NAME`;
    without a name the module itself."""
    return _FromFolder(place)
