"""What a call leaves behind in its process: put back, or told. Each test in a process of its own, which it spoils."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import pytest


def _run(text: str, folder: pathlib.Path) -> str:
    script = folder / "spoils.py"
    script.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_SETTINGS = """
    import decimal, gc, multiprocessing, os, pathlib, resource, signal, socket, sys, threading
    import numpy, torch
    from sgpu.worker.pristine import Pristine

    def seen():
        cuda, matmul = torch.backends.cuda, torch.get_float32_matmul_precision()
        return {
            "streams": sys.stdout.name, "hooks": (sys.excepthook is sys.__excepthook__, threading.excepthook),
            "gc": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)), "depth": sys.getrecursionlimit(),
            "imports": len(sys.meta_path), "profile": sys.getprofile(), "decimal": decimal.getcontext().prec,
            "timer": signal.getitimer(signal.ITIMER_REAL), "socket": socket.getdefaulttimeout(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE), "method": multiprocessing.get_start_method(True),
            "numpy": numpy.geterr(), "dtype": torch.get_default_dtype(), "device": str(torch.get_default_device()),
            "grad": torch.is_grad_enabled(), "anomaly": torch.is_anomaly_enabled(), "matmul": matmul,
            "deterministic": torch.are_deterministic_algorithms_enabled(), "mkldnn": torch.backends.mkldnn.enabled,
            "fill": torch.utils.deterministic.fill_uninitialized_memory,
            "denormal": float(torch.tensor(1e-310, dtype=torch.float64) * 1),
            "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
            "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        }

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    before, pristine = seen(), Pristine()
    sys.excepthook = threading.excepthook = lambda *_: None
    sys.stdout = open(os.devnull, "w")
    gc.disable(), gc.set_threshold(7, 7, 7), gc.callbacks.append(lambda *_: None)
    sys.setrecursionlimit(4321), sys.meta_path.insert(0, type("Finder", (), {"find_spec": lambda *_: None}))
    sys.setprofile(lambda *_: None)
    decimal.getcontext().prec = 5
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 600)
    socket.setdefaulttimeout(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    multiprocessing.set_start_method("spawn")
    numpy.seterr(all="raise")
    torch.set_default_dtype(torch.float64), torch.set_default_device("meta"), torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True), torch.set_float32_matmul_precision("medium")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.mkldnn.enabled = False
    torch.set_flush_denormal(True), torch.autograd.set_detect_anomaly(True)
    torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.set_autocast_enabled("cpu", True), torch.set_autocast_dtype("cpu", torch.float16)
    with torch.device("cpu"):
        spoilt = seen()
    pristine.restore(pathlib.Path("/nowhere"))
    assert pristine.lost() is None, pristine.lost()
    assert seen() == before, (seen(), before)
    unchanged = [name for name in before if spoilt[name] == before[name] and name != "device"]
    assert not unchanged, unchanged
    multiprocessing.set_start_method("spawn")  # as the first call could
    print("as before")
"""


def test_settings_are_put_back(tmp_path: pathlib.Path) -> None:
    assert _run(_SETTINGS, tmp_path) == "as before\n"


_ENTERED = """
    import pathlib
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from sgpu.worker.pristine import Pristine

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def same(value):
        return value

    pristine = Pristine()
    for entered in (
        torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), Calls(), Dispatches(),
        torch.autograd.graph.saved_tensors_hooks(same, same), torch.device("meta"),
    ):
        with entered:
            pristine.restore(pathlib.Path("/nowhere"))
            print(pristine.lost())
        pristine.restore(pathlib.Path("/nowhere"))
        assert pristine.lost() is None, pristine.lost()
"""


def test_what_was_entered_and_not_left_is_told(tmp_path: pathlib.Path) -> None:
    """An interrupt strikes between any two instructions, also between a `with` and its end."""
    assert [line.removesuffix(" was entered and not left") for line in _run(_ENTERED, tmp_path).splitlines()] == [
        "torch.autocast", "torch.inference_mode", "a torch function mode", "a torch dispatch mode",
        "torch.autograd.graph.saved_tensors_hooks", "a torch function mode",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("patch", "what"),
    [
        ("torch.nn.functional.relu = functools.partial(torch.nn.functional.relu, inplace=True)", "functional.relu"),
        ("torch.optim.lr_scheduler.StepLR.get_lr = lambda self: [1.0]", "lr_scheduler.StepLR.get_lr"),
        ("del torch.utils.data.DataLoader.__len__", "data.DataLoader.__len__"),
    ],
)
def test_what_was_patched_is_told(patch: str, what: str, tmp_path: pathlib.Path) -> None:
    text = f"""
        import functools, pathlib
        import torch
        import torch.optim.lr_scheduler
        from sgpu.worker.pristine import Pristine
        pristine = Pristine()
        {patch}
        pristine.restore(pathlib.Path("/nowhere"))
        print(pristine.lost())
    """
    assert f"{what} was replaced" in _run(text, tmp_path)


def test_modules_and_classes_of_the_users_own_are_made_anew(tmp_path: pathlib.Path) -> None:
    """Also modules that did not travel with the run; installed ones, wherever, stay as they are."""
    (tmp_path / "site-packages").mkdir()
    for place in ("helpers.py", "site-packages/library.py"):
        (tmp_path / place).write_text("calls = []\n")
    text = """
        import pathlib, pickle, sys
        import cloudpickle
        from sgpu.worker.pristine import Pristine

        class Registry:
            names = []

        content = cloudpickle.dumps(Registry)
        cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
        sys.path.append("site-packages")
        pristine = Pristine()
        import helpers, library
        first = pickle.loads(content)
        first.late = True
        helpers.calls.append(1)
        library.calls.append(1)
        pristine.restore(pathlib.Path("/nowhere"))
        second = pickle.loads(content)
        sys.path.append("site-packages")
        import helpers, library
        print(helpers.calls, library.calls, hasattr(second, "late"))
    """
    assert _run(text, tmp_path) == "[] [1] False\n"
