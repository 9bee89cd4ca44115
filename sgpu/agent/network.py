"""What processes of a run need to find each other: variables in torchrun's names, ports, interfaces."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping

from sgpu import settings
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec


class ReservedPort:
    """A port of this node that nobody else is given, free for the worker that will listen on it.

    It is bound and does not listen: the system hands it to nobody, and a listener with SO_REUSEADDR may still take it.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def agent_environment(spec: RunSpec, *, address: str, gpus: str | None) -> dict[str, str]:
    """What every process of the run on this node starts with; the user's own `env` wins.

    Args:
        address: this node's.
        gpus: CUDA_VISIBLE_DEVICES, where this node is to have but a part of the machine's.
    """
    inherited = {key: value for key, value in settings.inherited().items() if key not in settings.WORKER_NAMES}
    defaults = {
        "OMP_NUM_THREADS": "1",  # as torchrun: workers share the cores
        "PYTHONUNBUFFERED": "1",
    }
    interface = interface_of(address)
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    if gpus is not None:
        inherited["CUDA_VISIBLE_DEVICES"] = gpus
    return {**defaults, **inherited, **spec.environment}


def worker_environment(
    spec: RunSpec, run: RunDir, *, rank: int, generation: int, address: str, store_port: int, master_port: int
) -> Mapping[str, str]:
    """One worker's variables. MASTER_PORT is for a user's own `init_process_group`; our runtime uses SGPU_STORE.

    `address` is the first node's, which hosts the store and rank 0.
    """
    node, local = divmod(rank, spec.gpus_per_node)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(len(spec.ranks_of(node))),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(spec.nodes),
        "NODE_RANK": str(node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(master_port),
        "SGPU_STORE": f"{address}:{store_port}",
        "SGPU_RUN_DIR": str(run.root),
        "SGPU_GENERATION": str(generation),
    }


_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where none has it."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
