"""The fit as an HTTP service beside the operator: `python -m scalerl_curvefit.sidecar`.

What lives here: requests turned into answers (`answers`, pure), the aiohttp application with its
limits on body, points, time and queue (`app`), its metrics (`metrics`), its own description
(`openapi`). What never does: state (any replica answers any request, the same way), Kubernetes, and
decisions.
"""
