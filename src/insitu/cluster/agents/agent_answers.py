"""What an agent answers other machines by the server of its store, beside partitions and rows."""

from __future__ import annotations

from typing import Any

from insitu.cluster.agents import head_change, job_copy_serving
from insitu.cluster.agents.agent_files import AgentFiles
from insitu.cluster.agents.head_change import HeadChange
from insitu.cluster.files import describe_error
from insitu.errors import InsituError
from insitu.paths import Paths

Fields = dict[str, Any]


class AgentAnswers:
    """Gives each question to the part of the agent that knows the answer. For several threads."""

    def __init__(self, paths: Paths, head: HeadChange, files: AgentFiles) -> None:
        self._paths = paths
        self._head = head
        self._files = files

    def answer(self, kind: str, fields: Fields, payload: bytes) -> tuple[Fields, bytes]:
        """Do what is asked for, and return failures as answers."""
        try:
            if kind in head_change.KINDS:
                return self._head.answer(kind, fields), b""
            if kind in job_copy_serving.KINDS:
                return job_copy_serving.answer_about_copies(self._paths, kind, fields)
        except (InsituError, OSError) as error:
            return describe_error(error), b""
        return self._files.answer(kind, fields, payload)
