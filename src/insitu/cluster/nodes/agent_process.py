"""The process of an agent.

`python -P -m insitu.cluster.nodes.agent_process HOME OPTIONS READY` with the token as its input is started
by `insitu agent --detach`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from insitu.base.errors import InsituError
from insitu.base.paths import Paths
from insitu.base.process.process_log import start_logging
from insitu.base.process.processes import ProcessIdentity
from insitu.cluster.job_hosts import tie_to
from insitu.cluster.nodes.agent import Agent
from insitu.cluster.wire import AgentOptions, keep_log_bounded, report_ready

logger = logging.getLogger("insitu")


def run_agent(
    paths: Paths, options: AgentOptions, token: str, report: Callable[[dict[str, Any]], None]
) -> None:
    """Be the agent until the head or a signal ends it. Raises InsituError if it can't join."""
    start_logging()
    # Else each stranger at the port of the store's server makes a line.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    tie_to(ProcessIdentity(*each) for each in options.tied_to)
    agent = Agent(paths, options, token)
    keep_log_bounded(paths.agent_log(agent.node))
    agent.run(report)


def main(arguments: list[str]) -> NoReturn:
    paths, options = Paths(Path(arguments[0])), AgentOptions(**json.loads(arguments[1]))
    ready = [int(arguments[2])]

    def report(message: dict[str, Any]) -> None:
        report_ready(ready.pop(), message)

    code = 0
    try:
        run_agent(paths, options, sys.stdin.read().strip(), report)
    except (InsituError, OSError) as error:
        code = error.exit_code if isinstance(error, InsituError) else 1
        if ready:
            report({"error": str(error), "code": code})
        else:
            logger.error("%s", error)
    sys.stderr.flush()
    os._exit(code)  # a stream of Flight that nobody reads would keep the process


if __name__ == "__main__":
    main(sys.argv[1:])
