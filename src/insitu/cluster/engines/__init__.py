"""Starts the processes of tasks on nodes and watches them, behind one seam.

Begin reading with `engine.py`, the seam; `local.py` is the engine of this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.engines.channel import Channel, ChannelClosed, Message, open_channel_pair
    from insitu.cluster.engines.engine import (
        Command,
        Ended,
        Engine,
        NodeState,
        Output,
        ProcessState,
        SignalName,
        TaskObserver,
        TaskSetup,
    )
    from insitu.cluster.engines.gpu_leases import count_free_gpus
    from insitu.cluster.engines.local import LocalEngine
    from insitu.cluster.engines.messages import EngineCalls, decode_command, encode_command, reply_to_call
    from insitu.cluster.engines.remote import RemoteEngine
    from insitu.cluster.engines.selection import open_engine
    from insitu.cluster.engines.server import EngineServer
    from insitu.cluster.engines.task_files import TaskFiles
    from insitu.cluster.engines.wakeup import Wakeup

__getattr__, __dir__ = export_lazily(__name__)
