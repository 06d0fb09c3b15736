"""The right of one attempt of the trainer to change a run's checkpoints and exports.

An attempt on a lost node may still run, and write, when the next one starts. Each attempt has a folder
``checkpoints/.attempt-<attempt>-<id>``, to which every rename of a checkpoint or an export leads, or from which it comes: a new one
is written in the folder and renamed to its name, an old one is renamed into the folder and removed there.

The next attempt makes its own folder appear, and then renames those of earlier attempts into its own (:meth:`Fence.begin`), before it
lists the checkpoints. From then on, each rename of an earlier attempt fails, since one of its two folders is gone: what that attempt
committed before is listed, and nothing of it appears afterwards. A folder that it creates again does not help it: it is created after
the next attempt's folder appeared, and :meth:`Fence.check`, between the creation and the renames, finds that.

Of two attempts that begin at the same time, the earlier one finds the folder of the later one, whichever appeared first. No step relies on
a lock, or on the clock: on NFS, a rename is atomic at the server, and an attempt's own change of ``checkpoints`` invalidates its
client's cached listing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_api.attempts import Attempt
from scalerl_trainer.errors import AttemptSuperseded

if TYPE_CHECKING:
    from scalerl_trainer.checkpoints.disk import Disk

log = logging.getLogger(__name__)

FOLDER = ".attempt-"
STAGED = ".tmp-"
"""Prefix of folders that are not complete, or are being removed."""
DAMAGED = "damaged-"


class Fence:
    """The right of the attempt with ``folder``. Only rank 0 has one."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self._disk = disk

    @classmethod
    def begin(cls, root: Path, attempt: Attempt | None, disk: Disk) -> Fence:
        """Take the right from all earlier attempts.

        Args:
            root: the run's ``checkpoints``.
            attempt: None: the one after the last, for a runtime that never starts two at once.

        Raises:
            AttemptSuperseded: a later attempt has begun.
            OSError: the volume cannot be written.
        """
        root.mkdir(parents=True, exist_ok=True)
        earlier = sorted(_attempts(root).items(), key=lambda item: item[1])
        last = earlier[-1][1] if earlier else Attempt(0, 0)
        attempt = attempt or last._replace(number=last.number + 1)
        fence = cls(root / f"{FOLDER}{attempt}-{uuid.uuid4().hex[:12]}", disk)
        if last > attempt:
            raise AttemptSuperseded(
                f"attempt {attempt} begins after attempt {last}, whose folder is {earlier[-1][0]}. Once no process of that attempt "
                "can write any more (its pods are gone, or their machines are off), remove that folder if this one is to continue"
            )
        # A folder that is renamed needs no space on a full volume.
        if not (earlier and fence._take(earlier[-1][0], fence.folder)):
            disk.make_directory(fence.folder)
        disk.sync(root)
        for folder, other in _attempts(root).items():
            if other <= attempt and folder != fence.folder:
                fence._take(folder, fence.folder / uuid.uuid4().hex)
        fence.check()
        disk.sync(root)
        kept = set()
        for path in [*fence.folder.glob(f"{DAMAGED}*"), *fence.folder.glob(f"*/{DAMAGED}*")]:
            target = root / path.name
            if target.exists():
                target = root / f"{path.name}-{uuid.uuid4().hex[:12]}"
            try:
                disk.rename(path, target)
            except OSError as error:
                log.error("cannot move %s to %s: %s", path, target, error)
                kept.add(path if path.parent == fence.folder else path.parent)
        for path in [*root.glob(f"{STAGED}*"), *fence.folder.iterdir()]:
            if path not in kept:
                with contextlib.suppress(OSError):
                    fence.remove(path)
        return fence

    def check(self) -> None:
        """Check that no other attempt has begun since. If ``checkpoints`` was deleted, with all in it, it is made again.

        Raises:
            AttemptSuperseded: one has; this attempt must end.
            OSError: the volume cannot be read or written.
        """
        root, own = self.folder.parent, self.folder.name
        found = _attempts(root) or _attempts(root)  # a listing may miss a folder that is being renamed
        # Another attempt would have a folder, or has ended mid-training, whose checkpoints it removes with the folder around them.
        if not found and root.parent.is_dir():
            root.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):  # by another thread
                self._disk.make_directory(self.folder)
            log.warning("%s was deleted and is made again", self.folder)
            found = _attempts(root)
        later = [
            folder.name for folder, attempt in found.items() if attempt >= found.get(self.folder, attempt)
        ]
        if later != [own]:
            others = ", ".join(name for name in later if name != own) or "none"
            raise AttemptSuperseded(
                f"a later attempt of the trainer has begun (in {root} there should be {own}, there is {others}): this one ends, and "
                "changes nothing more"
            )

    def remove(self, path: Path) -> None:
        """Remove a folder of this run.

        Raises:
            OSError: it is still there, or is in this attempt's folder and not removed completely.
        """
        staged = self.folder / f"{STAGED}{uuid.uuid4().hex}"
        self._disk.rename(path, staged)
        self._disk.remove(staged)

    def _take(self, folder: Path, target: Path) -> bool:
        """Rename another attempt's folder; False if it is gone."""
        try:
            self._disk.rename(folder, target)
        except FileNotFoundError:
            return False
        log.warning("took the right to write checkpoints from %s", folder.name)
        return True


def _attempts(root: Path) -> dict[Path, Attempt]:
    """The attempts' folders. Raises ``OSError`` for a folder that cannot be listed: others may be in it."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return {}
    found = (
        (root / name, Attempt.parse(name.removeprefix(FOLDER))) for name in names if name.startswith(FOLDER)
    )
    return {path: attempt for path, attempt in found if attempt is not None}
