"""What a checkpoint has of the engine: how a rank's part is taken, written at any time on any thread, and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from scalerl_trainer.checkpoints.engine_files import (
    HEADER,
    EngineHeader,
    Piece,
    SavedState,
    write_header,
    write_pieces,
)
from scalerl_trainer.checkpoints.host_copy import HostBuffers
from scalerl_trainer.engine.backend import Backend
from scalerl_trainer.engine.proximal import Proximal
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.engine.start_kl import StartSample
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models.policy import PREFIX, Policy


@dataclass(frozen=True)
class EngineState:
    """A rank's part of the engine's state."""

    rank: int
    pieces: Callable[[], list[Piece]]
    """Waits for the values that this rank owns."""
    header: EngineHeader | None
    """On rank 0."""
    start: StartSample | None
    """Completions of the start of the run; on rank 0, if it had some."""

    def write(self, directory: Path, progress: Callable[[int], None] | None = None) -> list[Path]:
        """Write the files of :mod:`.checkpoints.engine_files`, and return them; ``progress`` is called with numbers of written bytes.

        Raises:
            OSError
            RuntimeError: the host has not enough memory for a copy.
        """
        files = [write_pieces(directory, self.rank, self.pieces(), progress)]
        if self.header is not None:
            files.append(write_header(directory, self.header))
        if self.rank == 0 and self.start is not None:
            files.append(self.start.save(directory))
        return files


class TrainedState:
    """The weights and moments that this rank holds, and the proximal policy's weights while they differ. No method is a collective.

    Args:
        backend: of ``policy``.
        settings: have the adapters, if only those are trained.
    """

    def __init__(
        self, backend: Backend, policy: Policy, settings: EngineSettings, rank: int, device: torch.device
    ) -> None:
        self._backend, self._policy, self._rank = backend, policy, rank
        self._lora, self._base = settings.lora, settings.base
        self._host = HostBuffers(device)

    def views(self, updates: int, start: StartSample | None, proximal: Proximal | None) -> EngineState:
        """This rank's part; valid until the next update.

        Args:
            updates: number of updates so far.
        """
        return self._of(partial(list, self.pieces(proximal)), updates, start)

    def copy(self, updates: int, start: StartSample | None, proximal: Proximal | None) -> EngineState:
        """As :meth:`views`, being copied to the host; valid until the next copy. Nothing of it may change before :meth:`finish_copy`."""
        return self._of(self._host.copy(self.pieces(proximal)), updates, start)

    def finish_copy(self) -> None:
        """Wait until the last copy is made, or has failed."""
        self._host.wait()

    def _of(self, pieces: Callable[[], list[Piece]], updates: int, start: StartSample | None) -> EngineState:
        header = None
        if self._rank == 0:
            header = EngineHeader(
                updates, self._backend.optimizer_steps, self._shapes(), self._lora, self._base
            )
        return EngineState(self._rank, pieces, header, start)

    def restore(self, directory: Path, proximal: Proximal | None) -> int:
        """Load the state that any number of ranks wrote, at any ZeRO stage, by any engine, in any dtype; returns its updates.

        Raises:
            EngineError: the state is missing, or is another model's.
        """
        if not (directory / HEADER).is_file():
            raise EngineError(f"{directory / HEADER} is not a file: there is no engine state to load")
        saved = SavedState(directory)
        saved.check(self._shapes(), self._lora, self._base)
        with self._backend.restoring(saved.header.optimizer_steps):
            pieces = self._backend.pieces(owned=False)
            saved.load(replace(piece, name=piece.name.removeprefix(PREFIX)) for piece in pieces)
        if proximal is not None:
            proximal.restore(saved)
        return saved.header.steps_done

    def pieces(self, proximal: Proximal | None = None) -> Iterator[Piece]:
        """The pieces that this rank owns, which partition the state over ranks."""
        for piece in self._backend.pieces(owned=True):
            values = piece.values if proximal is None else piece.values | proximal.values_of(piece)
            yield replace(piece, name=piece.name.removeprefix(PREFIX), values=values)

    def _shapes(self) -> dict[str, list[int]]:
        return {
            name.removeprefix(PREFIX): list(self._backend.shape(parameter))
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        }
