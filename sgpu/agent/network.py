"""What workers need to find each other, in torchrun's names."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec


class ReservedPort:
    """A loopback port that nobody else is given, free for the worker that will listen on it.

    It is bound and does not listen: the system hands it to nobody, and a listener with SO_REUSEADDR may still take it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def worker_environment(
    spec: RunSpec, run: RunDir, *, rank: int, generation: int, store_port: int, master_port: int
) -> Mapping[str, str]:
    """One worker's variables. MASTER_PORT is for a user's own `init_process_group`; our runtime uses SGPU_STORE."""
    local = rank % spec.gpus_per_node
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.gpus_per_node),
        "GROUP_RANK": str(rank // spec.gpus_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "SGPU_STORE": f"127.0.0.1:{store_port}",
        "SGPU_RUN_DIR": str(run.root),
        "SGPU_GENERATION": str(generation),
    }
