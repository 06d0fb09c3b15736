"""HTTP service for fits and forecasts, a sidecar of the operator: `python -m scalerl_curvefit.sidecar`.

`forecast_answers` computes answers from requests, without I/O; `app` is the aiohttp application with its limits. Stateless: every
replica gives the same answer to the same request.
"""
