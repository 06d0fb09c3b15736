"""Names of objects without the label of a run, which the cache does not have: one list for all runs that start at about the same
time, in place of a read of each name of each run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.errors import Forbidden
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.names import RUN

LIST_SECONDS: Final = 5.0
"""How long a list counts. A name that is taken meanwhile is found when its object is created."""
CROWDED_SECONDS: Final = 60.0
"""How much longer the names of a namespace are read one by one whose list was too long or not permitted."""
MAX_LIST_BYTES: Final = 1 << 20
"""Of a list: about 1,000 objects. The list of a namespace with more would cost more memory and time than the reads it saves."""


@dataclass
class _Listed:
    until: float
    """When the list counts no more."""
    names: asyncio.Task[frozenset[str] | None] = field(init=False)
    """None: not known."""


class UnlabelledNames:
    """Knows which names are certainly free. clock: seconds."""

    def __init__(self, api: KubeApi, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._lists: dict[tuple[str, str], _Listed] = {}

    async def may_have(self, kind: str, namespace: str, name: str) -> bool:
        """Whether an object without the label of a run may have the name; True if that is not known.

        Raises:
            ApiError: the list failed.
        """
        if not kind_of(kind).watched:  # the operator's role does not permit a list
            return True
        now = self._clock()
        self._lists = {at: listed for at, listed in self._lists.items() if now < listed.until}
        listed = self._lists.get((kind, namespace))
        if listed is None or (listed.names.done() and listed.names.exception() is not None):
            self._lists[kind, namespace] = listed = _Listed(now + LIST_SECONDS)
            listed.names = asyncio.create_task(self._list(listed, kind, namespace))
        names = await asyncio.shield(listed.names)
        return names is None or name in names

    async def _list(self, listed: _Listed, kind: str, namespace: str) -> frozenset[str] | None:
        try:
            names = await self._api.names(kind, namespace, f"!{RUN}", MAX_LIST_BYTES)
        except Forbidden:
            names = None
        if names is None:
            listed.until += CROWDED_SECONDS
        return names
