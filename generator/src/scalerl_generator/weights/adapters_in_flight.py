"""Which adapters (LoRA) the server has to hold, and which of them a request samples with.

With ``trainer.lora.inFlight: FinishOnOwn`` each version of the adapters is a LoRA of vLLM's. A request names the newest one when it is
sent, and all of its tokens are of that one.

A name is of one installation, not of a version: a trainer that returned to a checkpoint publishes the same versions again.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

PUBLISHED = "/published"
"""``lora_path`` of published adapters, which are in no file; vLLM wants a path."""


@dataclass(eq=False)
class AdapterVersion:
    """One installation of adapters."""

    version: int
    name: str
    requests: int = 0
    """Number of its requests in flight."""
    idle: bool = False
    """It had none at the last update. vLLM may run a request for a moment after its client has left it."""


class AdapterVersions:
    """The adapters that the server holds, in order of installation."""

    def __init__(self) -> None:
        self._held: list[AdapterVersion] = []
        self.dropped: list[str] = []
        """Names that :meth:`needed` left out, and of which the server's frontend was not informed yet."""

    @property
    def newest(self) -> AdapterVersion | None:
        """The one that new requests name; None before the first update."""
        return self._held[-1] if self._held else None

    def next(self, version: int) -> AdapterVersion:
        """Adapters to install; a name never repeats."""
        return AdapterVersion(version, f"v{version}.{secrets.token_hex(8)}")

    def needed(self) -> list[str]:
        """Names of those that the server must keep during the update that begins now."""
        kept = [one for one in self._held if one.requests or not one.idle or one is self.newest]
        self.dropped += [one.name for one in self._held if one not in kept]
        self._held = kept
        for one in self._held:
            one.idle = not one.requests
        return [one.name for one in self._held]

    def installed(self, adapters: AdapterVersion) -> None:
        self._held.append(adapters)

    @contextlib.contextmanager
    def request(self) -> Iterator[AdapterVersion | None]:
        """While a request samples with the newest adapters."""
        one = self.newest
        if one is not None:
            one.requests += 1
        try:
            yield one
        finally:
            if one is not None:
                one.requests -= 1
