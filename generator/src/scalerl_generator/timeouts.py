"""Messages of requests that timed out: which limit, and its own seconds."""

from __future__ import annotations

import aiohttp


def timeout_reason(error: TimeoutError, limits: aiohttp.ClientTimeout) -> str:
    """What did not happen in time, with the limit that passed.

    >>> limits = aiohttp.ClientTimeout(total=600, sock_connect=5)
    >>> timeout_reason(aiohttp.ConnectionTimeoutError(), limits), timeout_reason(TimeoutError(), limits)
    ('no connection in 5 s', 'no answer in 600 s')
    """
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection in {limits.sock_connect:g} s"
    if isinstance(error, aiohttp.SocketTimeoutError) or limits.total is None:
        return f"no data for {limits.sock_read:g} s"
    return f"no answer in {limits.total:g} s"
