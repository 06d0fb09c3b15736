"""Finished runs of a namespace, as a prior of the forecast of another: read from the cache, with no request."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.forecast import EarlierRun
from scalerl_api.load import accepted_run
from scalerl_api.spec import RunSpec
from scalerl_operator.autoscaling.history import select
from scalerl_operator.build.storage import CURVE_KEY
from scalerl_operator.controller.accept import with_spec
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.types import Object
from scalerl_operator.names import RUN_UID, Names

FINISHED: Final = (Phase.COMPLETED, Phase.FAILED)
"""Not Suspended: it may be resumed. One that failed at its start has too few points and is left out."""

log = logging.getLogger(__name__)


class FinishedRuns:
    """Reads the finished runs of one namespace; uid: of the run that asks.

    The curve's ConfigMap is among the objects that the cache holds anyway. After each run the event loop has its turn.
    """

    def __init__(self, cache: Cache, namespace: str, uid: str) -> None:
        self._cache = cache
        self._namespace = namespace
        self._uid = uid

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        """Those that may be a prior of a run of this spec: the newest first, at most ``MAX_EARLIER_RUNS``."""
        runs = self._loaders(await self._newest())
        return await select(runs, spec, lambda text: log.info("namespace %s: %s", self._namespace, text))

    def _loaders(self, names: list[str]) -> Iterator[tuple[str, Callable[[], tuple[RunSpec, str]]]]:
        for name in names:
            run = self._cache.run(self._namespace, name)
            if run is not None:  # else deleted meanwhile
                curve = self._cache.get("ConfigMap", self._namespace, Names(name).curve)
                yield name, functools.partial(_load, run, curve)

    async def _newest(self) -> list[str]:
        """The names of all that are finished, the newest first."""
        finished = list[tuple[str, str]]()
        for namespace, name in self._cache.runs():
            if namespace != self._namespace:
                continue
            run = self._cache.run(namespace, name)
            if run is None or run["metadata"]["uid"] == self._uid:
                continue
            status = run.get("status") or {}
            if status.get("phase") in FINISHED:
                finished.append((str(status.get("completionTime", "")), name))
            await asyncio.sleep(0)
        return [name for _, name in sorted(finished, reverse=True)]


def _load(run: Object, curve: Object | None) -> tuple[RunSpec, str]:
    """What it ran with (its spec may have been edited since), and its curve."""
    if curve is None or (curve["metadata"].get("labels") or {}).get(RUN_UID) != run["metadata"]["uid"]:
        raise ValueError("it has no curve")
    kept = (run.get("status") or {}).get("acceptedSpec") or json.dumps(run["spec"])
    return accepted_run(with_spec(run, kept)).spec, str(curve["data"][CURVE_KEY])
