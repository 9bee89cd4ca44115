"""What can be sent to a worker, what cannot and is named, and how large it may be."""

from __future__ import annotations

import functools
import json
import linecache
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgpu.contract import payload
from sgpu.contract.errors import PayloadError
from sgpu.decorator import distributed

_LIMIT_BYTES = 10_000_000


def _notebook(source: str, name: str = "__main__") -> dict[str, Any]:
    """Runs `source` as a notebook cell would be: in a module that no other interpreter can import."""
    module = types.ModuleType(name)
    filename = f"/tmp/ipykernel_1/{abs(hash(source))}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), module.__dict__)
    return module.__dict__


def _pack(function: Callable[..., Any], *args: Any, limit_bytes: int = _LIMIT_BYTES, **kwargs: Any) -> bytes:
    return payload.pack(function, args, kwargs, limit_bytes=limit_bytes)


_CALLER = """
import json, pathlib, sys
from sgpu.contract import payload
call = payload.unpack(pathlib.Path(sys.argv[1]).read_bytes())
value = call.function(*call.args, **call.kwargs)
print(json.dumps({"value": value, "modules": sorted(sys.modules)}))
"""


def _call_elsewhere(content: bytes, folder: pathlib.Path) -> tuple[Any, set[str]]:
    """The value of the call in a fresh interpreter, and the modules that it has loaded then."""
    (folder / "payload.pkl").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", _CALLER, str(folder / "payload.pkl")], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["value"], set(told["modules"])


_CELL = """
import functools
FACTOR = 10

def helper(x):
    return x * FACTOR

def uses_helper(x):
    return helper(x)

def recursive(n):
    return 1 if n < 2 else n * recursive(n - 1)

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def make_closure(k):
    def inner(x):
        return x + k
    return inner

def defaults(a, b=3, *args, c=5, **kwargs):
    return [a, b, args, c, kwargs]

class Adder:
    def __init__(self, n):
        self.n = n
    def __call__(self, x):
        return x + self.n
    def method(self, x):
        return x - self.n

class Derived(Adder):
    def __call__(self, x):
        return super().__call__(x) * 2

square = lambda x: x * x
partial = functools.partial(defaults, 1, c=7)
"""


def _senders() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]]:
    cell = _notebook(_CELL)
    return {
        "helper": (cell["uses_helper"], (4,), 40),
        "recursive": (cell["recursive"], (5,), 120),
        "mutually recursive": (cell["even"], (7,), False),
        "closure": (cell["make_closure"](3), (4,), 7),
        "lambda": (cell["square"], (6,), 36),
        "defaults": (cell["defaults"], (1,), [1, 3, [], 5, {}]),
        "partial": (cell["partial"], (2,), [1, 2, [], 7, {}]),
        "callable object": (cell["Adder"](2), (5,), 7),
        "callable object with super": (cell["Derived"](2), (5,), 14),
        "bound method": (cell["Adder"](2).method, (5,), 3),
        "wrapped": (functools.wraps(cell["helper"])(cell["make_closure"](1)), (1,), 2),
    }


@pytest.mark.parametrize("name", sorted(_senders()))
def test_what_can_be_sent(name: str, tmp_path: pathlib.Path) -> None:
    function, args, expected = _senders()[name]
    value, _ = _call_elsewhere(_pack(function, *args), tmp_path)
    assert value == expected


def test_a_decorated_function_that_names_itself_leaves_the_launcher_behind(tmp_path: pathlib.Path) -> None:
    """`train` inside `train` is the decorated name: in the worker it is the plain function, and nothing is launched."""
    cell = _notebook(
        "import sgpu\n"
        "from sgpu import distributed\n"
        "@distributed(gpus=2)\n"
        "def train(n):\n"
        "    return [] if n == 0 else [type(train).__name__, train.__name__, *train(n - 1), *train.local(0)]\n"
        "def calls_another(n):\n"
        "    return train(n)\n"
    )
    for function in (cell["train"]._function, cell["calls_another"]):
        value, modules = _call_elsewhere(_pack(function, 2), tmp_path)
        assert value == ["InWorker", "train", "InWorker", "train"]
        heavy = {
            "sgpu.decorator",
            "sgpu.run",
            "sgpu.launch",
            "sgpu.widgets",
            "sgpu.agent",
            "mlflow",
            "IPython",
            "torch",
        }
        assert not modules & heavy


def test_starting_a_run_inside_a_worker_is_refused() -> None:
    @distributed(gpus=1)
    def train() -> None:
        raise AssertionError("not called")

    here = payload.unpack(_pack(lambda: train)).function()
    for name in ("distributed", "submit", "plan"):
        with pytest.raises(PayloadError, match=r"train\.distributed\(\) was called inside a worker"):
            getattr(here, name)()


def test_each_unpacking_gives_objects_of_its_own() -> None:
    content = _pack(lambda items: items.append(1) or items, [])
    for _ in range(2):
        call = payload.unpack(content)
        assert call.function(*call.args) == [1]


def _traceback() -> Any:
    try:
        raise KeyError
    except KeyError as error:
        return error.__traceback__


class _Opened:
    """Things that exist in one process only, made anew for each test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.file = (folder / "open").open("w")
        self.things: dict[str, Any] = {
            "lock": threading.Lock(),
            "file": self.file,
            "generator": (number for number in range(3)),
            "thread": threading.Thread(target=print),
            "frame": sys._getframe(),
            "traceback": _traceback(),
        }


@pytest.fixture
def opened(tmp_path: pathlib.Path) -> Iterator[dict[str, Any]]:
    made = _Opened(tmp_path)
    yield made.things
    made.file.close()


_KINDS = ["lock", "file", "generator", "thread", "frame", "traceback"]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_global_that_cannot_be_sent_is_named(kind: str, opened: dict[str, Any]) -> None:
    cell = _notebook("def train():\n    return culprit\ninnocent = 1\n")
    cell["culprit"] = opened[kind]
    _assert_names(cell["train"], "variable 'culprit' used by train()", type(opened[kind]).__name__)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_global_of_a_helper_is_named(kind: str, opened: dict[str, Any]) -> None:
    cell = _notebook(
        "def deep():\n    return culprit\ndef helper():\n    return deep()\ndef train():\n    return helper()\n"
    )
    cell["culprit"] = opened[kind]
    _assert_names(cell["train"], "variable 'culprit' used by deep()", type(opened[kind]).__name__)


def _assert_names(function: Callable[..., Any], where: str, kind: str) -> None:
    with pytest.raises(PayloadError) as caught:
        _pack(function)
    told = str(caught.value)
    assert told.startswith(f"{where} is a {kind} and cannot be sent to the workers")
    assert "Make it inside the function" in told
    assert caught.value.variable == where


def test_other_places_are_named_too() -> None:
    lock = threading.Lock()

    def closure() -> Any:
        return lock

    def default(a: Any = lock) -> Any:
        return a

    def keyword(*, guard: Any = lock) -> Any:
        return guard

    class Holder:
        def __init__(self) -> None:
            self.lock = lock

        def __call__(self) -> Any:
            return self.lock

        def method(self) -> Any:
            return self.lock

    def told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        with pytest.raises(PayloadError) as caught:
            _pack(function, *args, **kwargs)
        return str(caught.value)

    assert "variable 'lock' used by " in told(closure)
    assert "closure()" in told(closure)
    assert "default value of 'a' of " in told(default)
    assert "default value of 'guard' of " in told(keyword)
    assert told(print, 1, lock).startswith("argument 1 is a lock")
    assert told(print, key=lock).startswith("argument 'key' is a lock")
    assert told(functools.partial(closure)).startswith("variable 'lock' used by ")
    assert told(functools.partial(print, lock)).startswith("argument 0 bound by the partial is a lock")
    assert "attribute 'lock' of the Holder is a lock" in told(Holder())
    assert "attribute 'lock' of the Holder is a lock" in told(Holder().method)


def test_an_object_among_many_is_named() -> None:
    """A dictionary that holds it somewhere inside is what the user can change."""
    cell = _notebook("def train():\n    return settings['guard']\n")
    cell["settings"] = {"lr": 0.1, "guard": threading.Lock()}
    with pytest.raises(PayloadError, match="variable 'settings' used by train"):
        _pack(cell["train"])


def test_the_largest_variable_is_named_with_its_size() -> None:
    cell = _notebook("small = b'x' * 1000\ndef helper():\n    return big\ndef train(a):\n    return small, helper\n")
    cell["big"] = bytes(3_000_000)
    with pytest.raises(PayloadError, match="variable 'big' used by helper") as caught:
        _pack(cell["train"], 1, limit_bytes=1_000_000)
    assert 3_000_000 <= caught.value.size_bytes < 3_001_000
    assert "3 MB" in str(caught.value)
    assert "may be 1 MB" in str(caught.value)
    assert "SGPU_MAX_PAYLOAD_BYTES" in str(caught.value)
    with pytest.raises(PayloadError, match="argument 'data' is 5 MB"):
        _pack(lambda data: data, data=bytes(5_000_000), limit_bytes=1_000_000)
    assert len(_pack(lambda data: data, data=bytes(5_000_000))) > 5_000_000


def test_cell_sources_arrive(tmp_path: pathlib.Path) -> None:
    """The traceback in another interpreter shows the cell's own line."""
    cell = _notebook("def fail():\n    marker = 1\n    raise KeyError(marker)  # the user's own line\n")
    content = _pack(cell["fail"])
    (tmp_path / "p").write_bytes(content)
    script = (
        "import pathlib, sys\nfrom sgpu.contract import payload\n"
        "import traceback\n"
        "try:\n"
        "    payload.unpack(pathlib.Path(sys.argv[1]).read_bytes()).function()\n"
        "except KeyError:\n"
        "    traceback.print_exc()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "p")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "raise KeyError(marker)  # the user's own line" in done.stderr


def test_sources_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long session with huge cells does not bloat each call; the newest cells go along."""
    for index in range(40):
        text = f"# cell {index}\n" + "x" * 200_000 + "\n"
        monkeypatch.setitem(linecache.cache, f"<cell {index}>", (len(text), None, [text], f"<cell {index}>"))
    content = _pack(lambda: 1)
    assert len(content) < 5_000_000
    payload.unpack(content)
    assert "<cell 39>" in linecache.cache
