"""A trainer that dies during a publish: it sends one bucket, reports it, and never sends the next.

Run as a script: ``doomed_sender.py EPOCH VERSION BUCKET_BYTES`` with a manifest as JSON on stdin. Prints
the store's port, then ``sent``.
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from scalerl_api.weight_layout import lay_out, tensor_checksum, trailer
from scalerl_api.wire import TensorSpec


def main() -> None:
    epoch, version, bucket_bytes = (int(a) for a in sys.argv[1:])
    first = lay_out([TensorSpec(*row) for row in json.loads(sys.stdin.readline())], bucket_bytes)[0]
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
    )
    print(store.port, flush=True)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=120)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(dist.PrefixStore(f"scalerl-{epoch}", store), 0, 2, options)
    group.allreduce([torch.ones(1)]).wait()
    buffer = torch.zeros(first.total_bytes, dtype=torch.uint8)
    words = trailer(version, first.index, tensor_checksum(torch, buffer[: first.payload_bytes]))
    buffer[first.payload_bytes :].view(torch.int64).copy_(torch.tensor(words))
    how = dist.BroadcastOptions()
    how.rootRank = 0
    group.broadcast([buffer], how).wait()
    print("sent", flush=True)
    time.sleep(60)


main()
