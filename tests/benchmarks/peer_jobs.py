"""The job under NVRx' in-process wrapper and under torchft; run by a Python that has them: see peers_apart.py.

python -m tests.benchmarks.peer_jobs nvrx|torchft FOLDER STEPS CHECKPOINT_EVERY
"""

from __future__ import annotations

import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from tests.benchmarks import jobs

_TURN = timedelta(seconds=0.1)  # of all that looks again and again; 1 s is what they come with


def in_process(folder: str, total: int, every: int) -> None:
    """Both ranks in processes that nobody watches but the wrapper. Gloo is freed for it, which by itself it cannot."""
    import nvidia_resiliency_ext.inprocess as inprocess
    import torch.distributed as dist
    from nvidia_resiliency_ext.inprocess import CallWrapper

    class FreeGloo(inprocess.abort.Abort):  # type: ignore[misc,name-defined]
        def __call__(self, state: Any) -> Any:
            _half_close(all_but=int(os.environ["MASTER_PORT"]))
            return state

    def again(folder: str, total: int, every: int, call: CallWrapper = None) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"group{call.iteration}", call.base_store)
        jobs.bare(folder, total, every, store=store, alive=call.ping)

    again.__annotations__ = {"call": CallWrapper}  # it goes by classes, not by their names
    limit = timedelta(seconds=float(os.environ.get("BENCH_HANG_SECONDS", "60")))
    wrapper = inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(max_iterations=20),
        abort=FreeGloo(),
        monitor_thread_interval=_TURN,
        monitor_process_interval=_TURN,
        heartbeat_interval=_TURN,
        progress_watchdog_interval=_TURN,
        last_call_wait=_TURN,
        soft_timeout=limit,
        hard_timeout=2 * limit,
        heartbeat_timeout=timedelta(seconds=10),
        barrier_timeout=3 * limit + timedelta(seconds=15),
        termination_grace_time=_TURN,
    )
    wrapper(again)(folder, total, every)


def _half_close(*, all_but: int) -> None:
    """The TCP connections of this process, without those of the store at that port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with connection:
            try:
                if all_but not in (connection.getpeername()[1], connection.getsockname()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):
                continue  # no connection, or none over IP


def torchft(folder: str, total: int, _every: int) -> None:
    """This process is a replica group of its own; a new one gets the state from the other."""
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["BENCH_REPLICA"])
    net = jobs.plain_model()
    inner = torch.optim.AdamW(net.parameters())

    def load(state: Any) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    limit = timedelta(seconds=float(os.environ.get("BENCH_HANG_SECONDS", "30")))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        replica_id=f"replica{rank}_",
        timeout=limit,
    )

    def steps() -> Iterator[int]:
        while manager.current_step() < total:
            yield manager.current_step()

    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    jobs.train(steps(), model, optimizer, folder, rank, lambda _step, _loss: None)
    manager.shutdown(wait=False)


JOBS: dict[str, Callable[[str, int, int], None]] = {"nvrx": in_process, "torchft": torchft}

if __name__ == "__main__":
    kind, where, steps_text, every_text = sys.argv[1:]
    JOBS[kind](str(pathlib.Path(where)), int(steps_text), int(every_text))
