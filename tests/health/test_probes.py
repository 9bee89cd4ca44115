"""What each probe says of machines that are made of files."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch

from sgpu.contract.errors import InputError
from sgpu.health import known
from sgpu.health.debounce import Debounce
from sgpu.health.disk import Writing
from sgpu.health.gpu import GpuFigures, Gpus, judge
from sgpu.health.kernel import KernelLog, PcieErrors, xids
from sgpu.health.known import KnownAnswers, wrong_bytes, wrong_products
from sgpu.health.machine import Memory, SharedMemory
from sgpu.health.nic import Ports
from sgpu.health.nvml import NvmlGpus
from sgpu.health.probe import Context, Finding, Verdict
from sgpu.health.recorded import RecordedGpus

GOOD = {"uncorrectable": 0, "remap_failed": False, "throttles": 0}


def said(findings: Any) -> list[tuple[str, str, Verdict]]:
    return [(finding.scope, finding.probe, finding.verdict) for finding in findings]


@pytest.mark.parametrize(
    ("figures", "probe", "verdict", "evidence"),
    [
        (GOOD, "figures", Verdict.OK, "no trouble"),
        ({**GOOD, "throttles": 0x4}, "figures", Verdict.OK, "no trouble"),  # a power cap that somebody chose
        ({**GOOD, "lost": "GPU is lost"}, "present", Verdict.FAILED, "GPU is lost"),
        ({**GOOD, "uncorrectable": 2}, "ECC", Verdict.FAILED, "2 uncorrectable errors"),
        ({**GOOD, "remap_failed": True, "remap_pending": True}, "row remapping", Verdict.FAILED, "replaced"),
        ({**GOOD, "remap_pending": True}, "row remapping", Verdict.DEGRADED, "waits"),
        ({**GOOD, "throttles": 0x48, "celsius": 91}, "throttling", Verdict.DEGRADED, "HW slowdown, HW thermal at 91"),
        ({**GOOD, "throttles": 0x80}, "throttling", Verdict.DEGRADED, "HW power brake"),
        ({**GOOD, "links": 18, "links_up": 17}, "NVLink", Verdict.DEGRADED, "17 of 18"),
        ({**GOOD, "links": 18, "links_up": 18}, "figures", Verdict.OK, "no trouble"),
        ({**GOOD, "pcie_width": 8, "pcie_most": 16}, "PCIe", Verdict.DEGRADED, "x8 of x16"),
        ({**GOOD, "uncorrectable": None}, "figures", Verdict.UNKNOWN, "ECC errors"),
    ],
)
def test_figures_of_a_gpu(figures: dict[str, Any], probe: str, verdict: Verdict, evidence: str) -> None:
    (finding,) = judge(GpuFigures(index=3, **figures))
    assert (finding.scope, finding.probe, finding.verdict) == ("gpu 3", probe, verdict)
    assert evidence in finding.evidence


def test_only_visible_gpus_are_looked_at_and_a_missing_one_is_named(machine: Any) -> None:
    machine.gpus({}, {"uncorrectable": 1}, {})
    gpus = Gpus(RecordedGpus())
    assert said(gpus.run(machine.context(gpus=("0", "GPU-2")), 1.0)) == [
        ("gpu 0", "figures", Verdict.OK), ("gpu GPU-2", "figures", Verdict.OK),
    ]  # fmt: skip
    assert said(gpus.run(machine.context(gpus=("1", "7")), 1.0)) == [
        ("gpu 1", "ECC", Verdict.FAILED), ("gpu 7", "present", Verdict.FAILED),
    ]  # fmt: skip
    assert said(gpus.run(machine.context(gpus=()), 1.0)) == []
    assert len(said(gpus.run(machine.context(), 1.0))) == 3


def test_gpus_that_cannot_be_asked_are_unknown(machine: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken").write_text("{")
    (finding,) = Gpus(RecordedGpus()).run(machine.context(recorded=str(tmp_path / "broken")), 1.0)
    assert finding.verdict is Verdict.UNKNOWN


def test_device_files_without_the_library_are_unknown(machine: Any, monkeypatch: Any) -> None:
    machine.write("dev/nvidia0", "")
    machine.write("dev/nvidiactl", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (finding,) = Gpus(NvmlGpus()).run(machine.context(), 1.0)
    assert finding.verdict is Verdict.UNKNOWN
    assert finding.evidence.startswith("1 GPUs are not checked")
    (pathlib.Path(machine.root) / "dev/nvidia0").unlink()
    assert list(Gpus(NvmlGpus()).run(machine.context(), 1.0)) == []


@pytest.mark.parametrize(
    ("state", "physical", "verdict"),
    [
        ("4: ACTIVE", "5: LinkUp", Verdict.OK),
        ("1: DOWN", "3: Disabled", Verdict.OK),
        ("1: DOWN", "2: Polling", Verdict.DEGRADED),
        ("2: INIT", "5: LinkUp", Verdict.DEGRADED),
        ("", "5: LinkUp", Verdict.UNKNOWN),
    ],
)
def test_ports(machine: Any, state: str, physical: str, verdict: Verdict) -> None:
    machine.port("mlx5_0", state, physical)
    assert said(Ports().run(machine.context(), 1.0)) == [("nic mlx5_0:1", "ports", verdict)]


def test_a_machine_without_adapters_has_no_findings_of_them(machine: Any) -> None:
    assert list(Ports().run(machine.context(), 1.0)) == []
    assert list(KernelLog().run(machine.context(), 1.0)) == []
    assert list(PcieErrors().run(machine.context(), 1.0)) == []


def test_xids_of_the_hardware_are_told_and_those_of_programs_are_not(machine: Any) -> None:
    log = (
        "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,2,3,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,3,4,-;NVRM: Xid (PCI:0000:86:00): 31, pid=2, MMU fault\n"
    )
    (finding,) = xids(log)
    assert finding.scope == "gpu 0000:3b:00"
    assert "XID 79" in finding.evidence
    assert "2 times" in finding.evidence
    machine.write("dev/kmsg", log)
    (machine.root / "sys/module/nvidia").mkdir(parents=True)
    assert list(KernelLog().run(machine.context(), 1.0)) == [finding]
    (machine.root / "dev/kmsg").unlink()
    (blind,) = KernelLog().run(machine.context(), 1.0)
    assert blind.verdict is Verdict.UNKNOWN


def test_fatal_errors_of_the_bus(machine: Any) -> None:
    machine.write("sys/bus/pci/drivers/nvidia/0000:3b:00.0/aer_dev_fatal", "DLP 0\nTOTAL_ERR_FATAL 3\n")
    machine.write("sys/bus/pci/drivers/nvidia/0000:86:00.0/aer_dev_fatal", "DLP 0\nTOTAL_ERR_FATAL 0\n")
    (finding,) = PcieErrors().run(machine.context(), 1.0)
    assert finding.scope == "gpu 0000:3b:00.0"
    assert "3 fatal errors" in finding.evidence


def test_memory(machine: Any) -> None:
    (fine,) = Memory().run(machine.context(), 1.0)
    assert fine.verdict is Verdict.OK
    machine.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 10000 kB\n")
    machine.write("sys/fs/cgroup/memory.max", "500000000\n")
    (scarce,) = Memory().run(machine.context(), 1.0)
    assert scarce.verdict is Verdict.DEGRADED
    assert "cgroup allows 0.5 GB" in scarce.evidence


def test_shared_memory_that_is_not_there(machine: Any) -> None:
    (finding,) = SharedMemory().run(machine.context(shared_memory=str(machine.root / "none")), 1.0)
    assert finding.verdict is Verdict.FAILED


@pytest.mark.parametrize("speed", [False, True])
def test_writing_leaves_nothing(machine: Any, speed: bool) -> None:
    (finding,) = Writing(speed=speed).run(machine.context(), 1.0)
    assert finding.verdict in (Verdict.OK, Verdict.DEGRADED if speed else Verdict.OK)
    assert os.listdir(machine.root / "disk") == []


@pytest.mark.parametrize("number", [28, 30, 5])
def test_a_disk_that_cannot_be_written(machine: Any, monkeypatch: Any, number: int) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    (finding,) = Writing(speed=False).run(machine.context(), 1.0)
    assert finding.verdict is Verdict.FAILED
    assert os.strerror(number) in finding.evidence


def test_known_answers_on_this_cpu() -> None:
    (finding,) = KnownAnswers().run(Context(gpus=()), 60.0)
    assert (finding.scope, finding.verdict) == ("node", Verdict.OK)


def test_a_device_that_computes_wrongly_is_found(monkeypatch: Any) -> None:
    multiply = torch.matmul

    def wrong(left: Any, right: Any) -> Any:
        product = multiply(left, right)
        product[5, 7] += 1
        return product

    cpu = torch.device("cpu")
    assert wrong_products(torch, cpu) == 0
    monkeypatch.setattr(torch, "matmul", wrong)
    assert wrong_products(torch, cpu) == 1
    (finding,) = KnownAnswers().run(Context(gpus=()), 60.0)
    assert (finding.verdict, finding.at_once) == (Verdict.FAILED, True)
    assert "1 wrong values" in finding.evidence


def test_the_answer_is_the_integers_own() -> None:
    left, right, answer = known._matrices(torch)
    assert torch.equal(left.long() @ right.long(), answer.long())
    assert float(answer.max()) < 2**24, "exact in float32"


def test_memory_that_does_not_keep_what_was_written() -> None:
    class Stuck:
        """Memory whose third byte is stuck at 0."""

        uint8 = torch.uint8

        @staticmethod
        def empty(size: int, **how: Any) -> Any:
            class Bytes:
                def __init__(self) -> None:
                    self.held = torch.empty(size, **how)

                def fill_(self, value: int) -> None:
                    self.held.fill_(value)[2] = 0

                def __ne__(self, value: object) -> Any:
                    return self.held != value

            return Bytes()

    assert wrong_bytes(torch, torch.device("cpu"), 1000) == 0
    assert wrong_bytes(Stuck, torch.device("cpu"), 1000) == 3


def finding(verdict: Verdict, *, at_once: bool = False, name: str = "0") -> Finding:
    return Finding(probe="ECC", kind="gpu", name=name, verdict=verdict, evidence="", at_once=at_once)


def test_a_flicker_does_not_count() -> None:
    debounce = Debounce(needed=2, looks=3)
    bad, good = [finding(Verdict.FAILED)], [finding(Verdict.OK)]
    assert [bool(debounce.look(look)) for look in (bad, good, good, bad, good, bad, bad)] == [
        False, False, False, False, False, True, True,
    ]  # fmt: skip


def test_what_needs_no_second_look() -> None:
    debounce = Debounce(needed=3, looks=3)
    assert debounce.look([finding(Verdict.FAILED, at_once=True), finding(Verdict.FAILED, name="1")])[0].name == "0"
    assert debounce.look([finding(Verdict.DEGRADED), finding(Verdict.UNKNOWN)]) == []


@pytest.mark.parametrize(("needed", "looks"), [(0, 3), (4, 3)])
def test_a_debounce_that_makes_no_sense(needed: int, looks: int) -> None:
    with pytest.raises(InputError, match="needed"):
        Debounce(needed=needed, looks=looks)


def test_findings_and_contexts_travel() -> None:
    one = finding(Verdict.DEGRADED)
    assert Finding.from_dict(one.to_dict()) == one
    context = Context(gpus=("0", "1"), disks=("/a",), paths=("/b",))
    assert Context.from_dict(context.to_dict()) == context
    with pytest.raises(InputError, match="shared_memory"):
        Context.from_dict({"shm": "/dev/shm"})
