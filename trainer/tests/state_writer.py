"""Saves checkpoints in a loop, beside changes of the state, until it is killed. ``WRITER``: ``{"root": run directory}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_trainer_checkpointer import OnlyRank

from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints import write
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.engine_files import KEYS, EngineHeader, Piece
from scalerl_trainer.checkpoints.host_copy import HostBuffers
from scalerl_trainer.checkpoints.load import CheckpointLoader
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import Checkpointer
from scalerl_trainer.engine import EngineSettings, EngineState
from scalerl_trainer.fence import Fence

write.lower_priority = lambda: None  # on a loaded machine it would hardly write
given: dict[str, Any] = WRITER  # type: ignore[name-defined]  # noqa: F821
PARAMETERS, ELEMENTS = 4, 100_000


class Weights:
    """An engine whose every value is the step."""

    settings = EngineSettings()

    def __init__(self) -> None:
        self.step = 0
        self.host = HostBuffers(torch.device("cpu"))
        self.values = torch.zeros(PARAMETERS, len(KEYS), ELEMENTS)

    def copy_state(self) -> EngineState:
        pieces = [Piece(f"p{i}", 0, dict(zip(KEYS, self.values[i], strict=True))) for i in range(PARAMETERS)]
        header = EngineHeader(self.step, float(self.step), {piece.name: [ELEMENTS] for piece in pieces})
        return EngineState(0, self.host.copy(pieces), header, None)

    def load(self, directory: Path) -> None:
        pass


paths = RunPaths(Path(given["root"]))
engine: Any = Weights()
ranks: Any = OnlyRank(60.0)
store = CheckpointStore(paths, 2, fence=Fence.begin(paths.checkpoints, None, Disk()))
checkpointer = Checkpointer(store, ranks, engine)
engine.step = CheckpointLoader(store, ranks, engine).load() or 0
while True:
    engine.step += 1
    engine.host.wait()
    engine.values.fill_(float(engine.step))
    if checkpointer.flushed:
        saved = checkpointer.finish()
        assert saved.error is None, saved.error
    if not checkpointer.pending:
        assert checkpointer.start(engine.step, b"snapshot %d" % engine.step) is None
