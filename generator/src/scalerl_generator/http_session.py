"""The actor's HTTP sessions."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp


def open_session(
    headers: Mapping[str, str] | None = None, connector: aiohttp.TCPConnector | None = None
) -> aiohttp.ClientSession:
    """A session that decompresses no answer and keeps no cookies. Its answers are read by :mod:`scalerl_api.answers`."""
    return aiohttp.ClientSession(
        headers=headers, connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )
