"""A rank's part of the engine's state, to be written at any time, on any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scalerl_trainer.checkpoints.engine_files import EngineHeader, Piece, write_header, write_pieces
from scalerl_trainer.engine.start_kl import StartSample


@dataclass(frozen=True)
class EngineState:
    """A rank's part of the engine's state."""

    rank: int
    pieces: list[Piece]
    """The values that this rank owns."""
    header: EngineHeader | None
    """On rank 0."""
    start: StartSample | None
    """Completions of the start of the run; on rank 0, if it had some."""

    def write(self, directory: Path, progress: Callable[[int], None] | None = None) -> list[Path]:
        """Write the files of :mod:`.checkpoints.engine_files`, and return them; ``progress`` is called with numbers of written bytes.

        Raises:
            OSError
        """
        files = [write_pieces(directory, self.rank, self.pieces, progress)]
        if self.header is not None:
            files.append(write_header(directory, self.header))
        if self.rank == 0 and self.start is not None:
            files.append(self.start.save(directory))
        return files
