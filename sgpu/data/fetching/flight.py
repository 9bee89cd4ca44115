"""How many downloads to have on their way: more while more brings more, fewer where it brings nothing. Pure.

Throughput over a window is compared with that of the window before: while a quarter more downloads bring at least a
twentieth more bytes, the number grows; where they do not, it goes back, and is tried again after some windows, since a
volume's speed changes. (Gradient-based limits as in Netflix' concurrency-limits; the signal here is throughput.)
"""

from __future__ import annotations

from dataclasses import dataclass

_GROWTH = 1.25
_WORTH = 1.05
_REST_WINDOWS = 8


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A state of the rule; `after` gives the next.

    Attributes:
        limit: downloads at a time.
        least, most: of it.
        rate: bytes per second at `settled`, the number that the last growth began from; 0: not known yet.
        rest: windows until growth is tried again.
    """

    limit: int
    least: int
    most: int
    settled: int = 0
    rate: float = 0.0
    rest: int = 0

    def after(self, bytes_per_second: float, *, busy: bool) -> Flight:
        """Once a window is over.

        Args:
            busy: all of `limit` were on their way throughout; else the window says nothing.
        """
        if not busy or bytes_per_second <= 0:
            return self
        if self.rest:
            return self._with(limit=self.limit, settled=self.limit, rate=bytes_per_second, rest=self.rest - 1)
        if self.settled == 0 or self.limit == self.settled or bytes_per_second >= _WORTH * self.rate:
            more = min(self.most, max(self.limit + 1, int(self.limit * _GROWTH)))
            return self._with(limit=more, settled=self.limit, rate=bytes_per_second, rest=0)
        return self._with(limit=self.settled, settled=self.settled, rate=self.rate, rest=_REST_WINDOWS)

    def _with(self, *, limit: int, settled: int, rate: float, rest: int) -> Flight:
        kept = max(self.least, min(self.most, limit))
        return Flight(limit=kept, least=self.least, most=self.most, settled=settled, rate=rate, rest=rest)
