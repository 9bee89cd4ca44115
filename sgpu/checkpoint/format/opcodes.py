"""Looks at a pickle before it is run, for what would fill the memory or take for ever. Without torch.

A pickle of a few bytes can ask for gigabytes (by a memo index, or for a `bytearray`), or hold a tuple of two of a tuple
of two of ..., whose hash, as a dictionary's key, takes longer than anybody lives. No honest writer does either.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass, field

# More parts than any tuple of a checkpoint has, those of its parts and so on included.
MOST_PARTS = 10_000
# Longer ones are not followed value by value, which takes longer than reading them: what they could still do is to keep
# their reader busy.
FOLLOWED_BYTES = 256 * 1024
_REFUSED = {"DUP", "POP", "POP_MARK", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}
_TO_MARK = {"SETITEMS", "APPENDS", "ADDITEMS"}
_TO_MARK_THEN_PUSH = {"DICT", "LIST", "FROZENSET", "OBJ", "INST"}
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "STACK_GLOBAL": 2}
_POPS = {"APPEND": 1, "BUILD": 1, "SETITEM": 2, "PROTO": 0, "FRAME": 0, "BINPERSID": 0}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# What to do for an opcode: one of these, or 16 * kind + how many values it takes.
_PUSH, _MEMOIZE, _GET, _MARK, _TUPLE, _PUT, _CLEAR, _MAKE, _STOP, _REFUSE = range(10)
_POP_SOME, _TUPLE_SOME, _CALL_SOME = 16, 32, 48
_STEPS = {"MEMOIZE": _MEMOIZE, "GET": _GET, "BINGET": _GET, "LONG_BINGET": _GET, "MARK": _MARK, "TUPLE": _TUPLE,
          "PUT": _PUT, "BINPUT": _PUT, "LONG_BINPUT": _PUT, "STOP": _STOP}  # fmt: skip
_LINE = -1
_LENGTH_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4,
                 pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip


def _step_of(name: str) -> int:
    if name in _REFUSED:
        return _REFUSE
    if name in _TO_MARK or name in _TO_MARK_THEN_PUSH:
        return _CLEAR if name in _TO_MARK else _MAKE
    for counts, kind in ((_POPS, _POP_SOME), (_TUPLES, _TUPLE_SOME), (_CALLS, _CALL_SOME)):
        if name in counts:
            return kind + counts[name]
    return _STEPS.get(name, _PUSH)


def _argument_of(op: pickletools.OpcodeInfo) -> int:
    """Bytes of its argument; _LINE; or 256 + how many bytes tell the length of what follows them."""
    if op.arg is None:
        return 0
    if op.arg.n == pickletools.UP_TO_NEWLINE:
        return _LINE
    return op.arg.n if op.arg.n >= 0 else 256 + _LENGTH_BYTES[op.arg.n]


_STEP = [_REFUSE] * 256
_ARGUMENT = [0] * 256
for _op in pickletools.opcodes:
    _STEP[ord(_op.code)], _ARGUMENT[ord(_op.code)] = _step_of(_op.name), _argument_of(_op)


def _fixed() -> re.Pattern[bytes]:
    """A run of opcodes whose arguments have a fixed size, as long as nothing about them has to be looked at."""
    by_size: dict[int, bytes] = {}
    for code in range(256):
        wide_put = _STEP[code] == _PUT and _ARGUMENT[code] != 1
        if 0 <= _ARGUMENT[code] < 256 and _STEP[code] not in (_STOP, _REFUSE) and not wide_put:
            by_size[_ARGUMENT[code]] = by_size.get(_ARGUMENT[code], b"") + re.escape(bytes([code]))
    runs = (b"[%b]%b" % (codes, b"." * size if size else b"+") for size, codes in sorted(by_size.items()))
    return re.compile(b"(?:" + b"|".join(runs) + b")*", re.S)


_FIXED = _fixed()


@dataclass(kw_only=True)
class _Machine:
    """What is on the stack of whoever runs it: of each value, how many parts a hash of it would look at."""

    stack: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)

    def rare(self, step: int) -> None:
        if step in (_CLEAR, _MAKE):
            del self.stack[self.marks.pop() :]
            if step == _MAKE:
                self.stack.append(0)
        elif step >= _CALL_SOME:  # what is given may be what was taken
            given = max(self.stack[_CALL_SOME - step :])
            del self.stack[_CALL_SOME - step :]
            self.stack.append(given)
        elif step > _POP_SOME:
            del self.stack[_POP_SOME - step :]

    def tuple(self, start: int) -> None:
        parts = len(self.stack) - start + sum(self.stack[start:])
        if start < 0 or parts > MOST_PARTS:
            raise ValueError(f"it holds a tuple of {parts} parts; expected at most {MOST_PARTS}")
        del self.stack[start:]
        self.stack.append(parts)


def check(content: bytes) -> None:
    """Raises ValueError or IndexError unless an honest writer may have written it."""
    at, last = 0, -1
    while last != _STOP:
        begin = _FIXED.match(content, at).end() + 1  # type: ignore[union-attr]  # it matches nothing at least
        code = content[begin - 1]
        at = _end_of_argument(content, code, begin)
        last = _STEP[code]
        if last == _REFUSE:
            raise ValueError(f"its opcode {code:#04x} at byte {begin - 1} is in no checkpoint")
        if last == _PUT and _index(content, code, begin, at) > len(content):
            raise ValueError(f"it keeps a value as number {_index(content, code, begin, at)} of {len(content)} bytes")
    if len(content) <= FOLLOWED_BYTES:
        _follow(content)


def _end_of_argument(content: bytes, code: int, begin: int) -> int:
    size = _ARGUMENT[code]
    if size == _LINE:
        end = content.index(b"\n", begin) + 1
        return content.index(b"\n", end) + 1 if code in b"ci" else end  # GLOBAL and INST have two
    if size < 256:
        return begin + size
    counted = begin + size - 256
    return counted + int.from_bytes(content[begin:counted], "little")


def _follow(content: bytes) -> None:
    machine = _Machine()
    stack, marks, memo = machine.stack, machine.marks, machine.memo
    at = 0
    while True:
        code = content[at]
        step, size = _STEP[code], _ARGUMENT[code]
        begin = at + 1
        at = begin + size if 0 <= size < 256 else _end_of_argument(content, code, begin)
        if step == _PUSH:
            stack.append(0)
        elif step == _GET:
            stack.append(memo.get(_index(content, code, begin, at), 0))
        elif step == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif step == _MARK:
            marks.append(len(stack))
        elif step == _TUPLE:
            machine.tuple(marks.pop())
        elif _TUPLE_SOME <= step < _CALL_SOME:
            machine.tuple(len(stack) - step + _TUPLE_SOME)
        elif step == _PUT:
            memo[_index(content, code, begin, at)] = stack[-1]
        elif step == _STOP:
            return
        else:
            machine.rare(step)


def _index(content: bytes, code: int, begin: int, end: int) -> int:
    return int(content[begin:end]) if code in b"gp" else int.from_bytes(content[begin:end], "little")
