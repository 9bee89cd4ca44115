"""A machine made of files: a sysfs, a procfs and the figures of GPUs."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from sgpu.health.probe import Context

HEALTHY = {"uuid": "GPU-a", "name": "H100", "uncorrectable": 0, "remap_failed": False, "throttles": 0, "celsius": 40}


class FakeMachine:
    """Order of calls: `port` and `gpus` as wanted, then `context`."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        for folder in ("sys", "proc", "dev", "disk", "shm"):
            (root / folder).mkdir()
        self.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\nHugePages_Total: 0\n")
        self.recorded: pathlib.Path | None = None

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def port(self, name: str, state: str, physical: str) -> None:
        self.write(f"sys/class/infiniband/{name}/ports/1/state", state + "\n")
        self.write(f"sys/class/infiniband/{name}/ports/1/phys_state", physical + "\n")

    def gpus(self, *figures: dict[str, Any], **besides: Any) -> None:
        told = [{"index": index, **HEALTHY, "uuid": f"GPU-{index}", **more} for index, more in enumerate(figures)]
        self.recorded = self.root / "gpus.json"
        self.recorded.write_text(json.dumps({"gpus": told, **besides}))

    def context(self, **other: Any) -> Context:
        root = self.root
        return Context(**{
            "sys": str(root / "sys"), "proc": str(root / "proc"), "dev": str(root / "dev"),
            "shared_memory": "/dev/shm", "disks": (str(root / "disk"),),
            "recorded": str(self.recorded) if self.recorded else None, **other,
        })  # fmt: skip


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> FakeMachine:
    return FakeMachine(tmp_path)
