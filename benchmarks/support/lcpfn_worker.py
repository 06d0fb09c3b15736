"""Forecasts with `lcpfn` in a separate interpreter, since it needs torch ≤ 1.11 and numpy < 2.

    python lcpfn_worker.py NETWORK < jobs > quantiles

NETWORK: name of a network in the package, which downloads it from its authors' server at first use, or a file.
jobs: a JSON list of [x, y, x ahead], with x in epochs, at most 100 in total.
quantiles: the last line of the output, a JSON list with the .0025, .0075, … .9975 quantiles of y at the first x ahead of
each job.
"""

from __future__ import annotations

import json
import sys

import lcpfn
import torch

network, jobs = lcpfn.LCPFN(sys.argv[1]), json.load(sys.stdin)
levels = [(i + 0.5) / 200 for i in range(200)]
quantiles = []
for x, y, ahead in jobs:
    column = [torch.tensor(values, dtype=torch.float32).unsqueeze(1) for values in (x, y, ahead)]
    quantiles.append(network.predict_quantiles(*column, levels)[0].tolist())
print(json.dumps(quantiles))
