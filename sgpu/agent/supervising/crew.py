"""The worker processes of one generation after the other: started, and where that is possible used again."""

from __future__ import annotations

from collections.abc import Iterable

from sgpu.agent.judging.failure import Failure
from sgpu.agent.network import ReservedPort, worker_environment
from sgpu.agent.supervising.withdrawal import Withdrawal
from sgpu.agent.workers import WorkerHost, worker_name
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec

_STOP_SECONDS = 5.0


class Crew:
    """Order of calls per generation: `start`; after a failure `withdraw` and `keep`, or `stop`. At the end `close`.

    Args:
        address: of the first node, where workers find each other.
    """

    def __init__(self, run: RunDir, spec: RunSpec, host: WorkerHost, *, address: str) -> None:
        self._run, self._spec, self._host, self._address = run, spec, host, address
        self._port = ReservedPort(address)
        self._members: tuple[int, ...] = ()
        self._parked: dict[tuple[int, int], str] = {}

    def start(self, number: int, live: RunSpec, members: tuple[int, ...]) -> None:
        """All ranks of generation `number` on the nodes `members`. Raises HostLostError."""
        self._host.begin(members)
        self._members = members
        self._port.close()
        self._port = ReservedPort(self._address)
        store_port = self._host.open_store(f"store{number}")
        for rank in range(live.world_size):
            self._run.attempt(number, rank).mkdir(parents=True, exist_ok=True, mode=0o700)
            environment = worker_environment(
                live, self._run, rank=rank, generation=number, address=self._address, store_port=store_port,
                master_port=self._port.port,
            )  # fmt: skip
            self._host.start(
                worker_name(number, rank), rank=rank, generation=number, environment=environment,
                log=self._run.log(number, rank), parked=self._parked.pop(self._place(rank), None),
            )  # fmt: skip
        self._end_parked()

    def withdraw(self, failure: Failure, running: Iterable[int], now: float) -> Withdrawal:
        self._end_parked()
        return Withdrawal(self._host, failure, running, now)

    def keep(self, number: int, ranks: Iterable[int]) -> None:
        """These are parked, and begin anew where the next generation has a rank in their place."""
        self._parked = {self._place(rank): worker_name(number, rank) for rank in ranks}

    def lose(self, node: int, running: set[int]) -> None:
        """The workers of a node have ended with it."""
        running -= {rank for rank in running if self._place(rank)[0] == node}

    def stop(self) -> None:
        self._parked.clear()
        self._host.stop_all(_STOP_SECONDS)

    def close(self) -> None:
        self._port.close()

    def _end_parked(self) -> None:
        """Those that were not needed, or could not be used after all."""
        if self._parked:
            self._host.end([*self._parked.values()], _STOP_SECONDS)
            self._parked.clear()

    def _place(self, rank: int) -> tuple[int, int]:
        """Node and local rank, which stay when ranks are dealt out anew."""
        index, local = divmod(rank, self._spec.gpus_per_node)
        return self._members[index], local
