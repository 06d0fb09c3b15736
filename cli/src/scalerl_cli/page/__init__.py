"""``scalerl view``: the runs of some directories as a local web page.

    command ─▶ server (aiohttp; token, headers, routes) ─▶ runs ─▶ appended, series, curve, timeline, rollouts (``scalerl_analysis``)
    index.html, page.js, page.css: all that the browser loads (``docs/adr/0021-the-page-is-served-by-aiohttp.md``)

This package reads files and draws; it writes nothing, and no request names a file. Statistics of curves, series and timelines come
from ``scalerl_analysis``, sentences about a run's health from ``scalerl_api.health``.
"""
