"""Train on parameter servers: the worker's side, and the program of a `ps` task.

The servers themselves are `insitu.parameters`. Begin reading with `step.py`.
"""

from insitu.train.parameter_server import coordinator, partitioners
from insitu.train.parameter_server.async_membership import ServerMembership
from insitu.train.parameter_server.coordinator import AssignmentGuard
from insitu.train.parameter_server.hybrid import HybridReplica
from insitu.train.parameter_server.layers import embeddings_of
from insitu.train.parameter_server.lookup import TableLookup, find_key_inputs
from insitu.train.parameter_server.model_spec import ClipNorms, clip_norms_of, refuse_recompile
from insitu.train.parameter_server.partitioners import check_partitioner
from insitu.train.parameter_server.server_marks import (
    ServerMarks,
    UpdateCount,
    UpdatePlan,
    check_vocabularies,
)
from insitu.train.parameter_server.server_task import serve_or_configure
from insitu.train.parameter_server.session import EndedFits, ParameterServerSession
from insitu.train.parameter_server.step import (
    DataCheck,
    LossScale,
    ServerAggregation,
    ServerLoopStep,
    ServerStep,
    SharedTests,
    attach_tables,
    check_coordination,
    optimizer_of,
)
