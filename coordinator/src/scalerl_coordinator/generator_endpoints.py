"""The endpoints of the generators' actors: decodes what core and store take encoded, reads prompts, and stores responses.

The decisions are those of :mod:`.generator_requests` and :mod:`.pushed_groups`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from scalerl_api import endpoints, wire
from scalerl_coordinator.core import WORK, Core, Refusal
from scalerl_coordinator.generator_requests import GeneratorRequests
from scalerl_coordinator.http import ErrorResponse, Post
from scalerl_coordinator.journaled_core import JournaledCore
from scalerl_coordinator.membership import new_member_id
from scalerl_coordinator.recording import Recording
from scalerl_coordinator.response_store import PastGroup, ResponseStore
from scalerl_tasks import PromptError, PromptSource, TaskError

PUSH_BODY_BYTES = 2**26
"""Limit of a push. It is higher if the run's lengths allow a larger group."""
_LOOKUPS = 4
"""Concurrent reads of past responses, each of up to ``wire.MAX_RESPONSES_BYTES``."""


class _RawPush(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A :class:`wire.Push` whose groups stay encoded, since these bytes are journaled."""

    member_id: str
    groups: list[msgspec.Raw]


_decode_group = msgspec.msgpack.Decoder(wire.Group).decode


class GeneratorEndpoints:
    """What actors may post.

    Args:
        prompts: training prompts, and those of the evaluation sets, by task.
        history: store of past responses, or None.
        recording: record of rollouts, or None.
    """

    def __init__(
        self,
        core: Core,
        journaled: JournaledCore,
        requests: GeneratorRequests,
        prompts: Mapping[wire.Split, Sequence[PromptSource]],
        history: ResponseStore | None,
        recording: Recording | None,
    ) -> None:
        self._core, self._journaled, self._requests = core, journaled, requests
        self._prompts, self._history, self._recording = prompts, history, recording
        # A separate pool: reads of the store must not occupy the default pool, which leases and shards need.
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="history-lookup")
        push_bytes = max(PUSH_BODY_BYTES, core.settings.max_group_bytes)
        self.posts = (
            Post(endpoints.MEMBERS, wire.Register, self._register),
            Post(endpoints.HEARTBEAT, wire.Heartbeat, self._heartbeat),
            Post(endpoints.LEASE, wire.LeaseRequest, self._lease),
            Post(endpoints.GROUPS, _RawPush, self._push, push_bytes),
            Post(endpoints.RELEASE, wire.Release, self._release),
            Post(endpoints.PARTIALS, wire.Partials, self._keep_partials, push_bytes),
            Post(endpoints.RESPONSES, wire.ResponsesRequest, self._responses),
        )

    def close(self) -> None:
        """Cancel the reads of past responses that have not begun."""
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _register(self, request: wire.Register) -> wire.Registered:
        member_id = new_member_id(request.name)
        return await self._journaled.decided(lambda now: self._requests.register(request, member_id, now))

    async def _heartbeat(self, request: wire.Heartbeat) -> wire.Ack:
        if self._journaled.refusing:
            self._core.membership.get(request.member_id, self._journaled.now())
            return wire.Ack()
        self._journaled.decide(lambda now: self._requests.heartbeat(request, now))
        return wire.Ack()

    async def _lease(self, request: wire.LeaseRequest) -> wire.Leases:
        self._journaled.decide(lambda now: self._requests.receive_lease_request(request, now))
        issued: list[wire.Lease] = []

        def attempt(now: float) -> wire.Leases | None:
            leases = self._requests.offer(request.member_id, request.max_groups, now)
            issued.extend(leases.leases if leases is not None else ())
            return leases

        try:
            leases = await self._journaled.poll(WORK, request.wait_seconds, attempt)
            if leases is None or not leases.leases:
                return leases or wire.Leases(leases=[])
            # Off the event loop, since a generated task generates the prompt to compute its id.
            ids, failed = await asyncio.to_thread(self._prompt_ids, issued)
            if failed:
                await self._journaled.decided(lambda now: self._requests.give_up_prompts(failed, now))
        except TaskError as problem:
            raise self._journaled.fail(problem) from problem
        finally:
            # Also if the client has disconnected: heartbeats from now on reveal a response that did not arrive.
            self._core.book.mark_sent((lease.lease_id for lease in issued), self._journaled.now())
            self._requests.end_lease_request(request.member_id)
        return wire.Leases(leases=self._with_prompt_ids(issued, ids))

    def _prompt_ids(self, leases: list[wire.Lease]) -> tuple[list[str], dict[str, str]]:
        """The prompt id of each lease ("" if the prompt cannot be generated), and the failures' reasons by lease id."""
        ids, failed = [], {}
        for lease in leases:
            try:
                ids.append(self._prompts[lease.split][lease.prompt.task][lease.prompt.index].id)
            except PromptError as problem:
                ids.append("")
                failed[lease.lease_id] = str(problem)
        return ids, failed

    def _with_prompt_ids(self, leases: list[wire.Lease], ids: list[str]) -> list[wire.Lease]:
        """The leases to send: with their prompt ids, and without those that were closed while the prompts were read."""
        book, now = self._core.book, self._journaled.now()
        to_send = []
        for lease, prompt_id in zip(leases, ids, strict=True):
            remaining = book.remaining_seconds(lease.lease_id, now)
            if remaining is not None:
                book.set_prompt_id(lease.lease_id, prompt_id)
                to_send.append(
                    msgspec.structs.replace(lease, prompt_id=prompt_id, remaining_seconds=remaining)
                )
        return to_send

    async def _push(self, request: _RawPush) -> wire.PushReply:
        groups = []
        for index, raw in enumerate(request.groups):
            try:
                groups.append(_decode_group(raw))
            except msgspec.DecodeError as problem:
                raise ErrorResponse(
                    400, "bad-request", str(problem).replace("`$", f"`$.groups[{index}]")
                ) from None

        def push_all(now: float) -> list[tuple[wire.PushResult, str | None]]:
            self._core.membership.get(request.member_id, now)
            return [
                self._requests.pushes.receive(request.member_id, group, bytes(raw), now)
                for group, raw in zip(groups, request.groups, strict=True)
            ]

        versions = {
            group.lease_id: lease.policy_version
            for group in groups
            if (lease := self._core.state.leases.get(group.lease_id)) is not None
        }
        answers = await self._journaled.decided(push_all)
        for group, (result, _) in zip(groups, answers, strict=True):
            if result is not wire.PushResult.ACCEPTED:
                continue
            if group.split is wire.Split.TRAIN:
                self._store_responses(group)
            if self._recording is not None and group.text is not None:
                self._recording.keep_content(group, versions.get(group.lease_id, -1))
        return wire.PushReply(
            results=[result for result, _ in answers], reasons=[reason for _, reason in answers]
        )

    async def _release(self, request: wire.Release) -> wire.Ack:
        await self._journaled.decided(lambda now: self._requests.release(request, now))
        return wire.Ack()

    async def _keep_partials(self, request: wire.Partials) -> wire.PartialsReply:
        return self._journaled.decide(lambda now: self._requests.receive_partials(request, now))

    def _store_responses(self, group: wire.Group) -> None:
        """Store the responses of an accepted training group for drafts."""
        if self._history is None:
            return
        responses = [
            wire.PastResponse(max(span.version for span in one.versions), one.token_ids)
            for one in group.completions
        ]
        digest = wire.prompt_digest(group.prompt_token_ids)
        drafted, accepted = group.drafted_tokens, group.accepted_tokens
        drafts = None if drafted is None or accepted is None else (drafted, accepted)
        self._history.put(PastGroup(group.prompt, digest, responses, drafts))

    async def _responses(self, request: wire.ResponsesRequest) -> bytes:
        """An encoded :class:`wire.Responses`, assembled from the responses as they are encoded on disk."""
        if request.prompt.split is not wire.Split.TRAIN:
            raise Refusal("bad-request", "responses of evaluations are not stored")
        blob = b""
        if self._history is not None:
            blob = await asyncio.get_running_loop().run_in_executor(
                self._lookups, self._history.lookup, request.prompt, request.digest
            )
        return msgspec.msgpack.encode({"responses": msgspec.Raw(blob) if blob else []})
