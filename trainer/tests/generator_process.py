"""A fake generator without a model: receives weights like an actor, and answers leases with seeded random tokens.

``GENERATOR``: ``{"actor": {...} as ACTOR in actor_process.py, "name", "coordinator", "run_file",
"vocabulary", "seconds_per_group", "logprob", "bad_slots", "unusable"}``: slots whose log-probabilities are of no policy, and
whether no token has a finite log-probability, as from a server whose weights are not numbers.
"""

from __future__ import annotations

import runpy
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from scalerl_api import endpoints, wire
from scalerl_api.load import load_run
from scalerl_tasks import open_task

given: dict[str, Any] = GENERATOR  # type: ignore[name-defined]  # noqa: F821
module = runpy.run_path(str(Path(__file__).parent / "actor_process.py"), run_name="actor")
actor: dict[str, Any] = given["actor"]
headers = {"authorization": f"Bearer {actor['token']}", wire.WIRE_HEADER: str(wire.WIRE_VERSION)}
http = httpx.Client(base_url=given["coordinator"], headers=headers, trust_env=False, timeout=60)
task = open_task(load_run(Path(given["run_file"])).spec.task)
held_back: list[wire.Lease] = []
"""Leases of slots that are not permitted yet."""


class Unknown(Exception):
    pass


def call(path: str, message: wire.Struct, kind: type[Any]) -> Any:
    while True:
        try:
            answer = http.post(path, content=msgspec.msgpack.encode(message))
        except httpx.HTTPError:
            time.sleep(0.1)
            continue
        if answer.status_code == 507:
            time.sleep(0.1)
            continue
        if answer.status_code == 200:
            return msgspec.msgpack.decode(answer.content, type=kind)
        if answer.status_code == 404:
            raise Unknown
        raise RuntimeError(answer.text)


def version() -> int:
    taken = [int(p.stem[1:]) for p in Path(actor["directory"]).glob("v*.pt")]
    return max(taken, default=-1)


def completion(lease: wire.Lease, sample: int, held: int) -> wire.Completion:
    random = np.random.default_rng([lease.slot, sample])
    tokens = int(random.integers(2, 6))
    usual = given["logprob"] or -np.log(given["vocabulary"])
    logprob = -60.0 if lease.split is wire.Split.TRAIN and lease.slot in given["bad_slots"] else usual
    return wire.Completion(
        token_ids=random.integers(3, given["vocabulary"], tokens).astype("<i4").tobytes(),
        logprobs=np.full(tokens, 0.0 if given["unusable"] else logprob, "<f4").tobytes(),
        versions=[wire.VersionSpan(wire.MASKED if given["unusable"] else held, 0)],
        finish_reason="stop",
    )


def member() -> None:
    port = Path(actor["directory"]) / "port"
    while not port.exists():
        time.sleep(0.01)
    register = wire.Register(
        name=given["name"], control_url=f"http://127.0.0.1:{port.read_text()}", task_digest=task.train.digest
    )
    while True:
        try:
            me = call(endpoints.MEMBERS, register, wire.Registered)
            held_back.clear()
            while True:
                work(me)
        except Unknown:
            continue


def permitted_slots() -> float:
    """See ``Run.permit``."""
    try:
        return float((Path(actor["directory"]) / "slots").read_text())
    except FileNotFoundError:
        return float("inf")


def work(me: wire.Registered) -> None:
    held = version()
    beat = wire.Heartbeat(
        member_id=me.member_id, weight_version=held, healthy=True, busy_seconds=0.0, generated_tokens=0
    )
    call(endpoints.HEARTBEAT, beat, wire.Ack)
    if held < 0:
        time.sleep(0.1)
        return
    request = wire.LeaseRequest(member_id=me.member_id, weight_version=held, max_groups=4, wait_seconds=0.5)
    held_back.extend(call(endpoints.LEASE, request, wire.Leases).leases)
    for lease in list(held_back):
        if lease.split is wire.Split.TRAIN and lease.slot >= permitted_slots():
            continue
        held_back.remove(lease)
        if given["skip_held_out"] and lease.split is wire.Split.HELD_OUT:
            continue
        time.sleep(given["seconds_per_group"])
        sampled_by = version()  # a publish may have come while it waited for the lease
        completions = [completion(lease, s, sampled_by) for s in range(lease.completions)]
        group = wire.Group(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            slot=lease.slot,
            prompt_id=lease.prompt_id,
            prompt_token_ids=np.array([4, 5, 6], "<i4").tobytes(),
            completions=completions,
            unusable_tokens=sum(c.tokens for c in completions) if given["unusable"] else 0,
            verdicts=wire.Verdicts(scores=[float((s + lease.slot) % 2) for s in range(lease.completions)]),
            generation_seconds=0.01,
        )
        call(endpoints.GROUPS, wire.Push(member_id=me.member_id, groups=[group]), wire.PushReply)


threading.Thread(target=member, daemon=True).start()
module["serve"](**actor)
