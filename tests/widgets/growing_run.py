"""Writes a run folder as the agent and the workers would, in the time that it is told, with one failure on the way.

    python growing_run.py RUN_DIR SECONDS [--hostile] [--fail]

Ends early, as CANCELLED, when the folder's `cancel` appears.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import random
import sys
import time

from sgpu.contract import atomic, events, records
from sgpu.contract.heartbeat import Category, Page
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status

RANKS = 2
HOSTILE = '<img src=x onerror="window.hacked=1"></script>'
FAILURE = "CUDA error: an illegal memory access was encountered"
TRACEBACK = f"""Traceback (most recent call last):
  File "<ipython-input-3>", line 12, in train
    loss = step(model, optimizer, images, labels)
  File "<ipython-input-3>", line 4, in step
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
RuntimeError: {FAILURE}
"""


def make(run: RunDir, *, hostile: bool = False, accelerator: str = "cuda") -> None:
    run.create()
    RunSpec(
        id=run.id,
        name=HOSTILE if hostile else "train",
        created=time.time(),
        backend="local",
        world_size=RANKS,
        gpus_per_node=RANKS,
        accelerator=accelerator,
        seed=1,
        tracking=Tracking(uri="sqlite://", experiment="sgpu"),
        python=sys.executable,
        working_dir=".",
    ).write(run)


class Writer:
    def __init__(self, run: RunDir, seconds: float, hostile: bool) -> None:
        self.run, self.seconds, self.hostile = run, seconds, hostile
        self.started = time.time()
        self.total = max(40, int(seconds * 40))
        self.page = Page.create(run.heartbeat, RANKS)
        self.slots = [self.page.slot(rank) for rank in range(RANKS)]
        self.random = random.Random(7)

    def status(self, state: str, generation: int, step: int, **more: object) -> None:
        Status(
            state=state, updated=time.time(), started=self.started, generation=generation, restarts=generation,
            step=step, total_steps=self.total, **more,
        ).write(self.run)  # fmt: skip

    def log(self, generation: int, rank: int, content: bytes) -> None:
        path = self.run.log(generation, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)

    def start(self, generation: int) -> None:
        events.emit(self.run, "generation_started", generation=generation, cause="rank 1 ended" if generation else None)
        for rank, slot in enumerate(self.slots):
            slot.start(generation, pid=os.getpid())
            self.log(generation, rank, f"rank {rank}: model with 1,234,567 parameters\n".encode())

    def step(self, generation: int, step: int) -> None:
        loss = 2.3 * math.exp(-step / self.total * 3) + 0.05 * self.random.random()
        values = {
            "loss": loss,
            "accuracy": 1 - loss / 2.5,
            "learning_rate": 1e-3 * (1 + math.cos(math.pi * step / self.total)) / 2,
            "fetch_seconds": 0.002 + 0.001 * self.random.random(),
            "step_seconds": 0.02 + 0.002 * self.random.random(),
        }
        if self.hostile:
            values[HOSTILE] = loss
        if step % 97 == 50:
            values["loss"] = math.nan
        for rank, slot in enumerate(self.slots):
            slot.beat(step, total_steps=self.total)
            line = {"time": time.time(), "step": step, "generation": generation, "values": values}
            records.append(self.run.spool(rank), line)
            done = step * 100 // self.total
            self.log(generation, rank, f"\r{done:3}%|{'#' * (done // 5):20}| {step}/{self.total}".encode())
            if step % 40 == 0:
                note = HOSTILE if self.hostile else "evaluated"
                self.log(generation, rank, f"\nrank {rank}: step {step} {note} loss {loss:.3f}\n".encode())

    def machine(self, step: int) -> None:
        """What two GPUs of 80 GB would tell, each step a second."""
        waves = [math.sin(step / 9 + rank) for rank in range(RANKS)]
        ranks = {
            str(rank): {
                "gpu_percent": 93.0 + round(6 * wave), "gpu_memory_bytes": 61e9 + 2e9 * wave,
                "gpu_memory_total_bytes": 80e9, "gpu_celsius": 62.0 + round(step / self.total * 9 + rank),
                "gpu_watts": 560 + 90 * wave, "cpu_percent": 99 + 8 * wave, "rss_bytes": 3.1e9 + step * 1e6,
            }
            for rank, wave in enumerate(waves)
        }  # fmt: skip
        node = {
            "cpu_percent": 24 + 5 * waves[0], "memory_bytes": 212e9 + 9e9 * waves[0], "memory_total_bytes": 1.08e12,
            "disk_bytes": 1.9e12 + 1e8 * step, "disk_total_bytes": 7.6e12,
            "network_in_bytes_per_second": 310e6 + 120e6 * waves[1], "network_out_bytes_per_second": 42e6,
        }  # fmt: skip
        record = {"time": self.started + step, "second": step, "node": node, "ranks": ranks}
        records.append(self.run.machine(0), record)

    def checkpoint(self, generation: int, step: int) -> None:
        for slot in self.slots:
            slot.account(Category.CHECKPOINT)
        time.sleep(0.02)
        events.emit(
            self.run, "checkpoint_committed", generation=generation, step=step, blocked_seconds=0.02, save_seconds=0.3,
            size_bytes=12_000_000, path=str(self.run.checkpoints / str(step)),
        )  # fmt: skip

    def steps(self, generation: int, first: int, last: int) -> bool:
        """False when the run was cancelled."""
        pause = self.seconds / self.total
        for step in range(first, last + 1):
            if self.run.cancel.exists():
                self.status("CANCELLED", generation, step, ended=time.time())
                return False
            self.step(generation, step)
            if step % (self.total // 8) == 0:
                self.checkpoint(generation, step)
            if step % 5 == 0:
                self.status("RUNNING", generation, step)
                self.machine(step)
            for slot in self.slots:
                slot.account(Category.DATA)
            time.sleep(pause * 0.06)
            for slot in self.slots:
                slot.account(Category.RECOMPUTING if step < slot.high_step else Category.PRODUCTIVE)
            time.sleep(pause * 0.8)
        return True


def grow(run: RunDir, seconds: float, *, hostile: bool = False, fail: bool = False) -> None:
    this_process().write(run.agent)
    writer = Writer(run, seconds, hostile)
    atomic.write_json(
        run.mlflow, {"run_id": "abc", "url": "http://127.0.0.1:5000/#/runs/abc", "open_command": "mlflow ui"}
    )
    events.emit(run, "run_started", generation=0, world_size=RANKS)
    writer.start(0)
    writer.status("RUNNING", 0, 0)
    interval = writer.total // 8
    crash = interval * 3 + interval // 2
    if not writer.steps(0, 1, crash):
        return
    writer.log(0, 1, b"\nrank 1: Fatal Python error: Segmentation fault\n")
    events.emit(run, "failure", generation=0, rank=1, step=crash, cause="SIGSEGV, signal 11", message="")
    events.emit(run, "restarting", generation=0, from_step=interval * 3, attempt=1, backoff_seconds=0.0)
    writer.status("RESTARTING", 1, crash)
    time.sleep(0.4)
    writer.start(1)
    for slot in writer.slots:
        slot.beat(interval * 3, total_steps=writer.total)
    events.emit(
        run, "resumed", generation=1, from_step=interval * 3, recomputed_steps=crash - interval * 3, seconds=0.9
    )
    last = writer.total * 3 // 4 if fail else writer.total
    if not writer.steps(1, interval * 3 + 1, last):
        return
    if fail:
        message = f"{FAILURE} {HOSTILE}" if hostile else FAILURE
        traceback = TRACEBACK.replace(f"Error: {FAILURE}", f"Error: {message}")
        writer.log(1, 1, ("\n" + traceback).encode())
        events.emit(run, "failure", generation=1, rank=1, step=last, cause="RuntimeError", message=message)
        facts = {
            "kind": "exception",
            "cause": "RuntimeError",
            "reason": "it would happen again",
            "rank": 1,
            "step": last,
            "message": message,
            "traceback": traceback,
        }
        events.emit(run, "run_ended", generation=1, state="FAILED", message=message)
        writer.status("FAILED", 1, last, ended=time.time(), failure=facts)
        return
    for slot in writer.slots:
        slot.finish()
    events.emit(run, "run_ended", generation=1, state="SUCCEEDED", message="")
    writer.status("SUCCEEDED", 1, last, ended=time.time())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--fail", action="store_true")
    asked = parser.parse_args()
    target = RunDir(asked.run_dir)
    if not target.spec.exists():
        make(target, hostile=asked.hostile)
    grow(target, asked.seconds, hostile=asked.hostile, fail=asked.fail)
