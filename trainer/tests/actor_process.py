"""A fake actor without a server: receives weights through a real process group.

Run as a process of its own (it is killed and frozen on purpose), with ``ACTOR`` set to a dict:
``directory`` where it says its port (``port``) and leaves each version it took (``v<version>.pt``),
``token``, ``weights`` (for files: their folder), and ``faults``: a list of dicts ``{"at": "join" | "allreduce" | "receive", "how": "kill" | "freeze" |
"refuse" | "not-ready" | "shoot" | "wait" | a number, "version": int | None, "bucket": int, "times": int}``; "shoot" kills the process
whose id is in the file ``victim`` and continues, "wait" does after ``seconds``. At "probe", a number is the log-probability of every token (else -5.5).
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from scalerl_api import endpoints, wire
from scalerl_api.weight_layout import check_trailer, checksum, lay_out, tensor_bytes
from scalerl_generator.weights.weight_files import WeightReader


class Refused(Exception):
    def __init__(self, error: str, message: str = "") -> None:
        super().__init__(message or error)
        self.error = error


class Actor:
    def __init__(
        self, directory: Path, faults: list[dict[str, Any]], check: bool = True, weights: Path | None = None
    ) -> None:
        self.directory, self.faults, self.check = directory, faults, check
        self.reader = None if weights is None else WeightReader(weights)
        self.pg: Any = None
        self.store: Any = None
        self.epoch = -1
        self.logprob = -5.5

    def fault(self, at: str, version: int | None = None, bucket: int = 0) -> None:
        for fault in self.faults:
            wanted = fault.get("version")
            if fault["at"] != at or (wanted is not None and wanted != version):
                continue
            if fault.get("bucket", 0) != bucket or fault.get("times", 1 << 30) <= 0:
                continue
            fault["times"] = fault.get("times", 1 << 30) - 1
            match fault["how"]:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "shoot":
                    os.kill(int(Path(fault["victim"]).read_text()), signal.SIGKILL)
                case "wait":
                    time.sleep(fault["seconds"])
                case float() as logprob:
                    self.logprob = logprob
                case how:
                    raise Refused(how)

    def join(self, join: wire.GroupJoin) -> wire.Struct:
        self.fault("join")
        self.pg = self.store = None
        timeout = timedelta(seconds=join.timeout_seconds)
        self.store = dist.TCPStore(
            join.store_host, join.store_port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = dist.PrefixStore(f"scalerl-{join.epoch}", self.store)
        self.pg = dist.ProcessGroupGloo(store, join.rank, join.world_size, options)
        self.fault("allreduce")
        ones = torch.ones(1)
        self.pg.allreduce([ones]).wait(timeout)
        assert int(ones) == join.world_size
        self.epoch = join.epoch
        return wire.Ack()

    def receive(self, message: wire.WeightReceive) -> wire.Struct:
        if message.files is not None:
            return self.read(message)
        if message.epoch != self.epoch or self.pg is None:
            raise Refused("wrong-epoch", f"in {self.epoch}, not {message.epoch}")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=message.timeout_seconds)
        pg, taken = self.pg, {}
        started = time.perf_counter()
        transfer = 0.0
        try:
            for bucket in lay_out(message.tensors, message.bucket_bytes):
                self.fault("receive", message.version, bucket.index)
                begin = time.perf_counter()
                buffer = torch.empty(bucket.total_bytes, dtype=torch.uint8)
                pg.broadcast([buffer], options).wait(options.timeout)
                transfer += time.perf_counter() - begin
                payload, trailer = buffer[: bucket.payload_bytes], buffer[bucket.payload_bytes :]
                if self.check:
                    sums = checksum(payload.numpy().tobytes())
                    check_trailer(trailer.view(torch.int64).tolist(), message.version, bucket.index, sums)
                for slot in bucket.slots:
                    flat = payload[slot.offset : slot.offset + tensor_bytes(slot.tensor)]
                    taken[slot.tensor.name] = flat.view(getattr(torch, slot.tensor.dtype)).view(
                        slot.tensor.shape
                    )
        except RuntimeError as error:
            if self.pg is pg:  # else another trainer has opened a group meanwhile
                self.pg = None
            raise Refused("update-failed", str(error)[:200]) from error
        if self.check:
            aside = self.directory / f"v{message.version}.tmp"
            torch.save({name: tensor.clone() for name, tensor in taken.items()}, aside)
            aside.rename(self.directory / f"v{message.version}.pt")
        return wire.WeightReceived(
            version=message.version,
            pause_seconds=0.0,
            transfer_seconds=transfer,
            load_seconds=time.perf_counter() - started - transfer,
            resume_seconds=0.0,
        )

    def read(self, message: wire.WeightReceive) -> wire.Struct:
        """Of ``weightSync.backend: Files``."""
        self.fault("receive", message.version)
        assert self.reader is not None
        assert message.files is not None
        self.reader.read(message.version, message.tensors, message.bucket_bytes, message.files)
        assert self.reader.copy is not None
        taken = {}
        for bucket, memory in zip(self.reader.copy.buckets, self.reader.copy.of_bucket, strict=True):
            for slot in bucket.slots:
                flat = memory[slot.offset : slot.offset + tensor_bytes(slot.tensor)].clone()
                taken[slot.tensor.name] = flat.view(getattr(torch, slot.tensor.dtype)).view(slot.tensor.shape)
        torch.save(taken, self.directory / f"v{message.version}.pt")
        return wire.WeightReceived(
            version=message.version,
            pause_seconds=0.0,
            transfer_seconds=0.0,
            load_seconds=0.0,
            resume_seconds=0.0,
        )

    def probe(self, message: wire.Probe) -> wire.Struct:
        self.logprob = -5.5
        self.fault("probe", message.version)
        lengths = [len(s) // 4 - p for s, p in zip(message.sequences, message.prompt_tokens, strict=True)]
        answers = [np.full(n, self.logprob, dtype="<f4").tobytes() for n in lengths]
        return wire.Probed(version=message.version, logprobs=answers)


def serve(
    directory: Path,
    token: str,
    faults: list[dict[str, Any]],
    check: bool = True,
    weights: Path | None = None,
) -> None:
    actor = Actor(directory, faults, check, weights)
    routes = {
        endpoints.WEIGHTS_JOIN: (wire.GroupJoin, actor.join),
        endpoints.WEIGHTS_RECEIVE: (wire.WeightReceive, actor.receive),
        endpoints.WEIGHTS_PROBE: (wire.Probe, actor.probe),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kind, answer = routes[self.path]
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["authorization"] == f"Bearer {token}"
            assert self.headers[wire.WIRE_HEADER] == str(wire.WIRE_VERSION)
            try:
                status, reply = 200, answer(msgspec.msgpack.decode(body, type=kind))
            except Refused as error:
                status, reply = 503, wire.Problem(error=error.error, message=str(error))
            except RuntimeError as error:
                status, reply = 502, wire.Problem(error="join-failed", message=str(error)[:200])
            data = msgspec.msgpack.encode(reply)
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    aside = directory / "port.tmp"
    aside.write_text(str(server.server_address[1]))
    aside.rename(directory / "port")
    server.serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(**ACTOR)  # type: ignore[name-defined]  # noqa: F821  # given by the code that runs this file
