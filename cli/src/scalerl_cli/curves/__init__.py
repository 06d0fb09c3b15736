"""``scalerl fit``, ``plan``, ``compare`` and ``report``: analyses of the curves of runs.

This package contains: reading and checking of curve files (``source``), pace and prices (``pace``, ``costs``), the analysis
that text, JSON and picture are made from (``analysis``), tables and pictures.

It does not contain statistics: every number about a curve comes from ``scalerl_curvefit``, and this package converts its unit
or formats it. ``docs/forecast.md`` explains every number.

matplotlib is imported when a picture is drawn, and numpy when one of the commands runs.
"""
