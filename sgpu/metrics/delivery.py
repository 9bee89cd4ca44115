"""Brings points to the tracking server in order, each metric's step once, over failures of either side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgpu.contract.failpoint import failpoint
from sgpu.contract.rundir import RunDir
from sgpu.metrics import progress as progress_file
from sgpu.metrics.progress import Chunk, Point, Progress
from sgpu.metrics.spool import read_chunk
from sgpu.metrics.writer import BATCH_POINTS, TrackingDownError, TrackingRefusedError, Writer

_COUNTING_POINTS = 100_000


class Delivery:
    """Reads a chunk, writes it in batches, keeps how far it is; then the next.

    Positions and marks are kept after each chunk that the server took. Where they may be behind the server (a crash in
    between, or a call whose answer was lost), the server's own last steps are asked for first.

    Attributes:
        idle: the last turn found nothing new anywhere.
        refused: points that the server will never take, and `refusal` the last reason.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        world_size: int,
        writer: Writer,
        sampled: Callable[[int], list[Point]],
    ) -> None:
        """`sampled(most)` gives points that stand in no file; what it gave is not given again."""
        self._run, self._world_size, self._writer, self._sampled = run, world_size, writer, sampled
        self._progress: Progress | None = None
        self._chunk: Chunk | None = None
        self._waiting: list[Point] = []
        self._behind = True
        self._more_samples = False
        self.idle = False
        self.refused = 0
        self.refusal = ""

    def turn(self) -> bool:
        """Writes at most one batch.

        Returns:
            Whether there is more to write right now.

        Raises:
            TrackingDownError: nothing is lost; call again later.
            TrackingRefusedError: the server will take nothing of this run any more.
        """
        progress = self._caught_up()
        self.idle = not self._waiting and not self._load(progress)
        if self.idle:
            return False
        batch, rest = self._waiting[:BATCH_POINTS], self._waiting[BATCH_POINTS:]
        if batch:
            self._log(progress, batch)
        self._waiting = rest
        if not rest and self._chunk is not None:
            progress.move(self._chunk)
            failpoint("metrics.batch_written")
            progress.write(self._run)
        return bool(rest) or (self._chunk is not None and self._chunk.more) or self._more_samples

    def count_left(self) -> int:
        """How many points were never delivered; for the end only."""
        progress = self._progress or progress_file.read(self._run)
        count = len(progress.fresh(self._waiting))
        if self._chunk is not None and self._waiting:
            progress.move(self._chunk)
        return count + count_undelivered(self._run, self._world_size, progress) + len(self._sampled(_COUNTING_POINTS))

    def _caught_up(self) -> Progress:
        """Opened, and not behind the server."""
        if self._progress is None:
            link = self._writer.open()
            kept = progress_file.read(self._run)
            self._progress = kept if kept.run_id == link.run_id else Progress(run_id=link.run_id)
        if self._behind:
            self._progress.raise_marks(self._writer.marks())
            self._waiting = self._progress.fresh(self._waiting)
            self._behind = False
        return self._progress

    def _load(self, progress: Progress) -> bool:
        """Reads the next chunk; whether files or samples had anything new."""
        chunk = read_chunk(self._run, self._world_size, progress, BATCH_POINTS)
        samples = self._sampled(BATCH_POINTS)
        self._more_samples = len(samples) >= BATCH_POINTS
        moved = chunk.events_offset != progress.events_offset or any(
            position != progress.spools.get(rank) for rank, position in chunk.spools.items() if position.inode
        )
        self._chunk = chunk
        self._waiting = progress.fresh([*chunk.points, *samples])
        return moved or bool(samples)

    def _log(self, progress: Progress, batch: Sequence[Point]) -> None:
        try:
            self._writer.log(batch)
        except TrackingDownError:
            self._behind = True  # it may have taken the batch and only the answer was lost
            raise
        except TrackingRefusedError as error:
            if error.gone:
                raise
            if len(batch) > 1:
                progress.raise_marks(self._writer.marks())  # refuses too where it is the run that is no more
            self._drop_refused(progress, batch, error)
        progress.raise_marks({point.key: point.step for point in batch})

    def _drop_refused(self, progress: Progress, batch: Sequence[Point], error: TrackingRefusedError) -> None:
        """Finds by halves which points the server does not want, and writes the others."""
        if len(batch) == 1:
            self.refused += 1
            self.refusal = f"{batch[0].key!r} at step {batch[0].step}: {error}"
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            self._log(progress, half)


def count_undelivered(run: RunDir, world_size: int, progress: Progress) -> int:
    """Points in the run's files beyond `progress`, which is moved to their end."""
    count, more = 0, True
    while more:
        chunk = read_chunk(run, world_size, progress, _COUNTING_POINTS)
        count, more = count + len(progress.deliver(chunk)), chunk.more
    return count
