"""A soak: three workers, and a fault every one to two seconds for as long as asked; then the questions."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sgpu
from sgpu import CheckpointPolicy, RestartPolicy, Run, distributed
from sgpu.contract import process
from sgpu.contract.heartbeat import Page, WorkerState
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir
from sgpu.data import DataLoader, VolumeDataset
from tests.faults.rig import forking, job, oracles
from tests.faults.rig.cell import prepare
from tests.faults.rig.disk import Disk

WORLD, EVERY = 3, 5
STEP_SECONDS = 0.01
SAMPLES = 15  # so that an epoch has its last, smaller step
RECOVERED_SECONDS = 90.0
POLICY = RestartPolicy(max_restarts=10**6, backoff_seconds=0.01, hang_seconds=3.0, start_seconds=15.0)


def train(volume: str, notes: str, until: int | None) -> dict[str, Any]:
    """As the cells' job, until somebody puts `stop` into the notes; it also fails where it is told to."""
    device = sgpu.runtime.init()
    rank, here = sgpu.runtime.rank(), pathlib.Path(notes)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    files = VolumeDataset(volume, shuffle=True, seed=5)
    loader: Any = DataLoader(job.Numbers(files), batch_size=job.BATCH, num_workers=0)
    loop = sgpu.TrainLoop(model=model, optimizer=optimizer, loader=loader, epochs=10**6, max_steps=until)
    with (here / f"rank{rank}.jsonl").open("a", buffering=1) as ledger:
        for numbers, features in loop:
            epoch = loop.epoch
            loss = model(features).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss.item())
            ledger.write(json.dumps([loop.step + 1, epoch, numbers.tolist(), loss.item()]) + "\n")
            if until is None:
                _be_told(here, rank)
                time.sleep(STEP_SECONDS)  # else the undisturbed run would take as long
                asked = torch.tensor(float((here / "stop").exists()))
                dist.all_reduce(asked, dist.ReduceOp.MAX)
                if asked:
                    loop.stop()
    return {"digest": job.digest(model, optimizer), "steps": loop.step}


def _be_told(here: pathlib.Path, rank: int) -> None:
    for kind in ("raise", "exit"):
        told = here / f"{kind}{rank}"
        if told.exists():
            told.unlink()
            if kind == "exit":
                os._exit(0)
            raise RuntimeError(f"rank {rank} was told to fail")


@dataclass(kw_only=True)
class Striker:
    """Strikes a run as chance has it, and keeps account."""

    run: Run
    notes: pathlib.Path
    disk: Disk
    chance: random.Random
    resumed: int = 0
    lines: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)

    def go_on(self, seconds: float) -> None:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            self.again_if_it_ended()
            if self.chance.random() > 0.2:  # else the fault comes while it recovers from the last one
                self.wait_for_a_step()
            time.sleep(self.chance.uniform(1.0, 2.0))  # the time between two faults, not a wait for something
            kind = self.chance.choice(list(KINDS))
            status = self.run.status
            hit = KINDS[kind](self)
            self.struck[kind] += hit
            at = f"{time.monotonic() - began:7.1f} s  step {status.step:5d}  generation {status.generation:4d}"
            self.lines.append(f"{at}  {kind}{'' if hit else ' (nobody was there)'}")

    def again_if_it_ended(self) -> None:
        if self.run.status.final:
            self.disk.mend()
            self.lines.append(f"          it had ended as {self.run.state}: resumed")
            self.run.resume()
            self.resumed += 1

    def beats(self) -> list[Any]:
        path = RunDir(pathlib.Path(self.run.path)).heartbeat
        if not path.exists():
            return []
        page = Page(path)
        found = page.beats()
        page.close()
        return found

    def wait_for_a_step(self) -> None:
        """Of every rank, since now; or for the run's end."""
        before = time.monotonic_ns()
        deadline = time.monotonic() + RECOVERED_SECONDS
        while time.monotonic() < deadline and not self.run.status.final:
            beats = self.beats()
            if beats and all(beat.state is WorkerState.TRAINING and beat.beat_ns > before for beat in beats):
                return
            time.sleep(0.02)
        assert self.run.status.final, f"no step of all ranks within {RECOVERED_SECONDS:g} s: {self.run.status}"

    def signal_rank(self, number: int, *, all_ranks: bool = False) -> bool:
        pids = [beat.pid for beat in self.beats() if beat.pid]
        mine = [pid for pid in pids if pid in process.descendants(os.getpid())]
        chosen = mine if all_ranks else self.chance.sample(mine, min(1, len(mine)))
        return sum(_signal(pid, number) for pid in chosen) > 0

    def signal_program(self, name: str, number: int) -> bool:
        agent = process.read_process(RunDir(pathlib.Path(self.run.path)).agent)
        found = process.descendants(agent.pid) if agent is not None and agent.alive() else []
        for pid in found:
            if name.endswith(forking.named(pid)) and forking.named(pid):
                return _signal(pid, number)
        return False

    def kill_agent(self) -> bool:
        agent: ProcessId | None = process.read_process(RunDir(pathlib.Path(self.run.path)).agent)
        return agent is not None and agent.signal(signal.SIGKILL)

    def tell(self, kind: str) -> bool:
        (self.notes / f"{kind}{self.chance.randrange(WORLD)}").touch()
        return True

    def fail_disk(self, kind: str, times: int) -> bool:
        self.disk.fail(kind, times=times, seconds=0.05)
        return True


def _signal(pid: int, number: int) -> bool:
    """Whether it was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


KINDS: dict[str, Callable[[Striker], bool]] = {
    "SIGKILL of a rank": lambda it: it.signal_rank(signal.SIGKILL),
    "SIGKILL of all ranks": lambda it: it.signal_rank(signal.SIGKILL, all_ranks=True),
    "SIGTERM of a rank": lambda it: it.signal_rank(signal.SIGTERM),
    "SIGINT of a rank": lambda it: it.signal_rank(signal.SIGINT),
    "SIGSTOP of a rank": lambda it: it.signal_rank(signal.SIGSTOP),
    "exception in a rank": lambda it: it.tell("raise"),
    "exit 0 of a rank": lambda it: it.tell("exit"),
    "SIGKILL of the checkpoint helper": lambda it: it.signal_program("sgpu.checkpoint.helper", signal.SIGKILL),
    "SIGSTOP of the checkpoint helper": lambda it: it.signal_program("sgpu.checkpoint.helper", signal.SIGSTOP),
    "SIGKILL of the zygote": lambda it: it.signal_program("sgpu.worker.zygote", signal.SIGKILL),
    "SIGKILL of the metrics forwarder": lambda it: it.signal_program("sgpu.metrics.forwarder", signal.SIGKILL),
    "SIGKILL of the supervisor": Striker.kill_agent,
    "an I/O error of the checkpoints' disk": lambda it: it.fail_disk("error", 1),
    "the checkpoints' disk is slow": lambda it: it.fail_disk("slow", 10),
}


def soak(folder: pathlib.Path, *, seconds: float, seed: int) -> dict[str, Any]:
    """Strikes, lets it end, and asks; what is wrong, and what happened."""
    disk = Disk("/checkpoints/")
    prepare(folder, disk=disk)
    for number in range(SAMPLES, job.FILES):
        (folder / "volume" / f"{number}.txt").unlink()
    notes = folder / "notes"
    policy = CheckpointPolicy(every_steps=EVERY, keep_last=2)
    submitted = distributed(gpus=WORLD, restarts=POLICY, checkpoints=policy)(train)
    run = submitted.submit(str(folder / "volume"), str(notes), None)
    striker = Striker(run=run, notes=notes, disk=disk, chance=random.Random(seed))
    striker.go_on(seconds)
    (notes / "stop").touch()
    disk.mend()
    while run.wait(300) != "SUCCEEDED":
        striker.again_if_it_ended()
    results = run.result(0)
    whole = distributed(gpus=WORLD)(train).submit(str(folder / "volume"), str(folder / "second"), results[0]["steps"])
    state = whole.wait(600)
    problems = [] if state == "SUCCEEDED" else [f"undisturbed: {state}: {whole.status.failure}"]
    if state == "SUCCEEDED" and whole.result(0) != results:
        problems.append(f"final weights: {results}, undisturbed {whole.result(0)}")
    problems += [*_ledger(folder, results[0]["steps"]), *_checkpoints(run, results[0]["steps"])]
    sgpu.cleanup()
    problems += oracles.left(folder)
    kinds = Counter(event["kind"] for event in run.events())
    return {
        "problems": problems, "struck": dict(striker.struck), "faults": striker.struck.total(), "lines": striker.lines,
        "resumed": striker.resumed, "steps": results[0]["steps"], "restarts": kinds["restarting"],
        "failures": kinds["failure"], "commits": kinds["checkpoint_committed"], "restores": kinds["restored"],
    }  # fmt: skip


def _ledger(folder: pathlib.Path, steps: int) -> Iterator[str]:
    """What the last life, which was told to stop, did not get to again is no part of what was trained."""
    try:
        found, whole = job.read_ledger(folder / "notes"), job.read_ledger(folder / "second")
    except AssertionError as error:
        yield f"ledger: {error}"
        return
    found = {rank: {step: facts for step, facts in done.items() if step <= steps} for rank, done in found.items()}
    if found != whole:
        yield "ledger: other steps, samples or losses than those of the undisturbed run"
    epochs: dict[int, list[int]] = {}
    for done in found.values():
        for epoch, numbers, _ in done.values():
            epochs.setdefault(epoch, []).extend(numbers)
    for epoch, numbers in epochs.items():
        if epoch < max(epochs) and sorted(numbers) != list(range(SAMPLES)):
            yield f"ledger: epoch {epoch} trained {sorted(numbers)}"


def _checkpoints(run: Run, steps: int) -> Iterator[str]:
    catalog = run.checkpoints()
    if catalog.latest() != steps:
        yield f"checkpoint: the newest is of step {catalog.latest()}, the run ended at {steps}"
    if damaged := catalog.quarantine(deep=True):
        yield f"checkpoint: damaged: {damaged}"
    yield from oracles.nothing_committed_is_lost(run.events(), damaged=False)
