"""A call that is given up: freed from collectives, interrupted, cleared up after. Real sockets and signals."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from sgpu.worker.abort import GlooAbort

_CALLS = """
import json, os, pathlib, sys, tempfile, threading, time
from sgpu.contract.shield import Shielded
from sgpu.worker.control import Control, Restart

aborted = []
class Abort:
    def abort(self):
        aborted.append(time.monotonic())

read, write = os.pipe()
control = Control(read, 0, abort=Abort(), leave=lambda: os._exit(7))
def tell(**message):
    os.write(write, (json.dumps(message) + "\\n").encode())
def interrupt_soon(generation=0):
    threading.Timer(0.1, tell, kwargs={"op": "interrupt", "generation": generation}).start()
"""

_CASES = {
    "sleep": """
interrupt_soon()
try:
    control.call(lambda: time.sleep(10_000))
except Restart:
    control.out(done=False)
    assert aborted and control.over
    print("ok")
""",
    "lock": """
interrupt_soon()
lock = threading.Lock()
lock.acquire()
try:
    control.call(lock.acquire)
except Restart:
    print("ok")
""",
    "swallowed": """
def stubborn():
    while True:
        try:
            time.sleep(10_000)
        except Exception:
            pass
interrupt_soon()
try:
    control.call(stubborn)
except Restart:
    print("ok")
""",
    "shielded": """
def careful():
    interrupt_soon()
    with Shielded():
        deadline = time.monotonic() + 30
        while len(aborted) < 3:
            assert time.monotonic() < deadline
        done.append(True)
    time.sleep(10_000)
done = []
try:
    control.call(careful)
except Restart:
    assert done
    print("ok")
""",
    "import": """
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "slow_module.py").write_text(
    "import __main__, time\\n"
    "while len(__main__.aborted) < 3:\\n    time.sleep(0.001)\\n"
    "whole = True\\n"
)
sys.path.insert(0, str(folder))
def imports():
    interrupt_soon()
    import slow_module
    time.sleep(10_000)
try:
    control.call(imports)
except Restart:
    assert sys.modules["slow_module"].whole
    print("ok")
""",
    "heard": """
import ctypes
from sgpu.contract.heartbeat import Page
page = Page.create(pathlib.Path(tempfile.mkdtemp()) / "page", 1)
control.begin(page.slot(0))
def heard():
    return page.slot(0).read().heard
def hold():
    tell(op="answer")
    tell(op="interrupt", generation=0)
    ctypes.PyDLL(None).usleep(300_000)
    held.append(heard())
    time.sleep(10_000)
held = []
try:
    control.call(hold)
except Restart:
    assert held in ([], [-1]), held  # the lock was given up a moment before the word
    assert heard() == 0 and page.slot(0).read().answers == 1
    print("ok")
""",
    "told before": """
tell(op="begin", generation=5)
assert control.next()["generation"] == 5
tell(op="interrupt", generation=5)
deadline = time.monotonic() + 30
while not control.over:
    assert time.monotonic() < deadline
try:
    control.call(lambda: print("called"))
except Restart:
    print("ok")
""",
    "an old word": """
tell(op="interrupt", generation=3)
tell(op="begin", generation=5)
assert control.next()["generation"] == 5
assert control.call(lambda: 7) == 7 and not control.over
print("ok")
""",
    "a result that came too late": """
control.call(lambda: 7)
control.out(done=True)
tell(op="interrupt", generation=0)
time.sleep(30)
""",
    "the agent is gone": """
os.close(write)
assert control.next() is None
print("ok")
""",
}


@pytest.mark.parametrize("case", _CASES)
def test_a_call_is_given_up(case: str) -> None:
    done = subprocess.run([sys.executable, "-c", _CALLS + _CASES[case]], capture_output=True, text=True, timeout=100)
    if case == "a result that came too late":
        assert done.returncode == 7, done.stderr
    else:
        assert done.stdout == "ok\n", done.stderr


class _Native:
    """A connection that Python does not own, as a native library's."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        one = socket.create_connection(self.listener.getsockname())
        two, _ = self.listener.accept()
        self.here, self.there = one.detach(), two.detach()

    def close(self) -> None:
        for number in (self.here, self.there):
            os.close(number)
        self.listener.close()


def test_gloo_is_freed_and_others_are_spared() -> None:
    native = _Native()
    listening = os.dup(native.listener.fileno())
    with socket.create_connection(native.listener.getsockname()) as own, native.listener.accept()[0] as peer:
        reads: list[bytes] = []
        stuck = threading.Thread(target=lambda: reads.append(os.read(native.here, 1)))
        stuck.start()
        GlooAbort().abort()
        stuck.join(30)
        assert reads == [b""], "who was stuck is free"
        own.sendall(b"x")
        assert peer.recv(1) == b"x", "Python's own sockets are spared"
        with socket.create_connection(native.listener.getsockname()):
            native.listener.accept()[0].close()
    os.close(listening)
    native.close()


def test_what_a_process_was_is_brought_back(tmp_path: pathlib.Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("calls = []\n")
    script = f"""
import os, pathlib, signal, sys, warnings
import torch
from sgpu.worker.pristine import Pristine
code = pathlib.Path({str(tmp_path / "code")!r})
sys.path.insert(0, str(code))
before = Pristine()
folder = os.getcwd()

import helper
helper.calls.append(1)
os.environ["CHANGED"] = "1"
os.chdir("/")
sys.path.append("/nowhere")
signal.signal(signal.SIGTERM, lambda *_: None)
warnings.simplefilter("ignore")
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = True
torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
torch.set_grad_enabled(False)

before.restore(code)
assert before.lost() is None, before.lost()
assert "CHANGED" not in os.environ and os.getcwd() == folder and "/nowhere" not in sys.path
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert torch.get_default_dtype() is torch.float32 and not torch.are_deterministic_algorithms_enabled()
assert not torch.backends.cudnn.benchmark and torch.is_grad_enabled()
assert not torch.nn.modules.module._global_forward_hooks
import helper as again
assert again is not helper and again.calls == []

import random
random.shuffle = lambda values: None
assert before.lost() == "random.shuffle was replaced", before.lost()
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == "ok\n", done.stderr
