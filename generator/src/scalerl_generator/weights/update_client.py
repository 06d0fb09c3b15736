"""The weights of a vLLM server: joins a group, reads files, installs a version. :mod:`.vllm_weight_engine` has the server's side.

Errors are those of :mod:`.vllm_replies` and :mod:`.update_reports`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time

import msgspec

from scalerl_api.wire import GroupJoin, WeightReceive, WeightReceived
from scalerl_generator.vllm_client import CONTROL_SECONDS, VllmClient
from scalerl_generator.vllm_replies import ServerRefused
from scalerl_generator.weights.adapters_in_flight import PUBLISHED, AdapterVersions
from scalerl_generator.weights.update_reports import (
    FetchContinues,
    FetchReport,
    FetchStalled,
    FetchUnreachable,
    PublishReport,
    UpdateFailed,
    read_fetch,
    read_join_problem,
    read_publish_report,
)

_MARGIN_SECONDS = 15.0
"""The client's timeout is this much longer than the worker's, so that the worker's error arrives."""
_FIRST_JOIN_POLL_SECONDS = 0.02
_LAST_JOIN_POLL_SECONDS = 0.25
"""Each poll takes a part of a step of the server."""


class WeightUpdateClient:
    """Requests that change the weights of one server, one at a time."""

    def __init__(self, server: VllmClient) -> None:
        self._server = server

    async def init_group(self, join: GroupJoin) -> None:
        """Join a process group, after leaving the current one. The server generates meanwhile.

        Raises:
            ServerRefused: the group did not form within ``join.timeout_seconds``.
        """
        path, body = "/init_weight_transfer_engine", {"init_info": msgspec.to_builtins(join)}
        deadline = time.monotonic() + join.timeout_seconds + _MARGIN_SECONDS
        await self._server.call("POST", path, body, CONTROL_SECONDS)
        poll = {"method": "scalerl_join_problem", "args": [str(join.epoch)]}
        interval = _FIRST_JOIN_POLL_SECONDS
        while True:
            await asyncio.sleep(interval)  # a group opens in milliseconds if all members are there
            interval = min(2 * interval, _LAST_JOIN_POLL_SECONDS)
            problem = read_join_problem(
                await self._server.call("POST", "/collective_rpc", poll, CONTROL_SECONDS)
            )
            if problem is None and time.monotonic() > deadline:
                problem = f"the group of epoch {join.epoch} is still opening"
            if problem:
                raise ServerRefused(path, 500, problem)
            if problem is not None:
                return

    async def fetch(self, request: WeightReceive) -> FetchReport:
        """Read one version from files into the server's memory. The server generates meanwhile.

        Raises:
            FetchContinues: it was not read within ``request.timeout_seconds``.
            FetchStalled: the same, and nothing was read.
            FetchUnreachable: it cannot be read, and no file is at fault.
            ServerRefused: it cannot be read.
        """
        path, deadline = "/collective_rpc", time.monotonic() + request.timeout_seconds
        encoded = base64.b64encode(msgspec.msgpack.encode(request)).decode()
        await self._server.call("POST", path, {"method": "scalerl_fetch", "args": [encoded]}, CONTROL_SECONDS)
        poll = {"method": "scalerl_fetched", "args": [str(request.version)]}
        interval, first = _FIRST_JOIN_POLL_SECONDS, None
        while True:
            await asyncio.sleep(interval)
            interval = min(2 * interval, _LAST_JOIN_POLL_SECONDS)
            report = read_fetch(await self._server.call("POST", path, poll, CONTROL_SECONDS))
            if report.problem == "":
                return report
            first = report if first is None else first
            if report.problem is None and time.monotonic() > deadline:
                late = f"not read after {request.timeout_seconds:g} s"
                if report.bytes == first.bytes:
                    of = "object store" if request.files is not None and request.files.to else "volume"
                    raise FetchStalled(path, 500, f"{late}, and nothing of it was: the {of} does not answer")
                raise FetchContinues(path, 500, f"{late}; the server continues to read it")
            if report.problem:
                raise (FetchUnreachable if report.unreachable else ServerRefused)(path, 500, report.problem)

    async def update_weights(self, request: WeightReceive, path: str = "") -> PublishReport:
        """Receive one version over the group, or load it from the memory at ``path`` into which it was fetched.

        Call between :meth:`.VllmClient.pause` and :meth:`.VllmClient.resume`. ``/finish_weight_update`` sets the server's
        ``weight_version``, with which vLLM labels each token that it samples from then on; the labels of a response are
        :attr:`.Sampled.weight_versions` (those of a request that keeps its adapters: their own version).

        Raises:
            UpdateFailed: the version is not installed. The server has left the group and can join another.
            ServerDown, BadReply: the server does not answer or answers wrongly; which weights it holds is unknown.
        """
        info = msgspec.to_builtins(request) | {"path": path}
        adapters = None
        if self._server.adapters is not None:
            adapters = self._server.adapters.next(request.version)
            info |= {"adapters": adapters.name, "needed_adapters": self._server.adapters.needed()}
        seconds = request.timeout_seconds + _MARGIN_SECONDS
        try:
            if (await self.publish_report()).active:  # a client that died left it open
                await self._abandon(request)
            await self._server.call("POST", "/start_weight_update", {}, CONTROL_SECONDS)
            await self._server.call("POST", "/update_weights", {"update_info": info}, seconds)
            report = await self.publish_report()
            if adapters is not None and not report.error:
                body = {"lora_name": adapters.name, "lora_path": PUBLISHED}
                await self._server.call("POST", "/v1/load_lora_adapter", body, CONTROL_SECONDS)
            finish = {} if report.error else {"weight_version": str(request.version)}
            await self._server.call("POST", "/finish_weight_update", finish, CONTROL_SECONDS)
        except ServerRefused as error:
            report = await self.publish_report()
            if adapters is not None and report.active:  # they arrived, and vLLM refused them
                await self._abandon(request)
            raise UpdateFailed(error.message, partial=report.state == "partial") from error
        if report.error:
            raise UpdateFailed(report.error, partial=report.state == "partial")
        if self._server.adapters is not None and adapters is not None:
            self._server.adapters.installed(adapters)
            await self._unload(self._server.adapters)
        return await self.publish_report()

    async def publish_report(self) -> PublishReport:
        """Report of the last update, combined over the workers (:func:`~.update_reports.read_publish_report`)."""
        body = {"method": "scalerl_publish_report"}
        return read_publish_report(await self._server.call("POST", "/collective_rpc", body, CONTROL_SECONDS))

    async def install(self, request: WeightReceive, fetched: FetchReport | None = None) -> WeightReceived:
        """Pause, receive one version over the group, or load one that was fetched, resume. Returns the duration of each phase.

        After a failure, the server is resumed only if its old weights are complete.

        Raises:
            UpdateFailed, ServerDown, BadReply: as :meth:`update_weights`.
        """
        fetched = fetched or FetchReport()
        started = time.perf_counter()
        await self._server.pause()
        paused = time.perf_counter()
        try:
            report = await self.update_weights(request, fetched.path)
        except UpdateFailed as error:
            if not error.partial:
                await self._server.resume()
            raise
        updated = time.perf_counter()
        await self._server.resume()
        return WeightReceived(
            version=request.version,
            pause_seconds=paused - started,
            transfer_seconds=fetched.seconds + report.transfer_seconds,
            load_seconds=report.verify_seconds + report.load_seconds + report.finish_seconds,
            resume_seconds=time.perf_counter() - updated,
        )

    async def _unload(self, adapters: AdapterVersions) -> None:
        """Have the server forget names that no request will have: it would keep each until its end."""
        while adapters.dropped:
            with contextlib.suppress(ServerRefused):  # a server that was restarted does not know it
                body = {"lora_name": adapters.dropped[-1]}
                await self._server.call("POST", "/v1/unload_lora_adapter", body, CONTROL_SECONDS)
            adapters.dropped.pop()

    async def _abandon(self, request: WeightReceive) -> None:
        """Abort an update that was started and will not be sent; the worker reports it as failed."""
        info = msgspec.to_builtins(request) | {"abort": True}
        await self._server.call("POST", "/update_weights", {"update_info": info}, CONTROL_SECONDS)
        await self._server.call("POST", "/finish_weight_update", {}, CONTROL_SECONDS)
