"""Runs in an interpreter that has `lcpfn`, which wants torch ≤ 1.11 and numpy < 2 and so cannot share this project's.

    python lcpfn_worker.py NETWORK < jobs > quantiles

NETWORK: a network's name in the package, which it fetches from its authors' server at first use, or a file. jobs: JSON,
[x, y, x ahead] each, x in epochs of at most 100 in all. quantiles: as the last line, JSON, for each job the .0025, .0075, … .9975
quantiles of y at the first x ahead.
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
