from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minimal_run import run_spec

from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.workloads import (
    Lifetime,
    Resources,
    Role,
    expand,
    literal,
    port_variable,
)

GIVEN = {
    "SCALERL_DIR": "/run",
    "SCALERL_BIND": "0.0.0.0",
    "SCALERL_ADDRESS": "pod-0.svc",
    "SCALERL_PORT_HTTP": "1",
    "SCALERL_PORT_VLLM": "2",
    "SCALERL_PORT_CONTROL": "3",
}


def test_roles_accept_the_command_lines() -> None:
    workloads = plan(run_spec()).workloads
    lines = {
        container.name: " ".join(expand(word, GIVEN) for word in container.argv)
        for workload in workloads
        for container in workload.containers
    }
    assert lines == {
        "prepare": "python -m scalerl_trainer.prepare",
        "coordinator": "python -m scalerl_coordinator.main --listen 0.0.0.0:1",
        "server": "python -m scalerl_generator.vllm_server --host 127.0.0.1 --port 2 --model /run/model "
        "--dtype bfloat16 --max-model-len 16384 --max-num-seqs 256 --memory-fraction 0.9 --seed 0 --tensor-parallel 1 "
        "--fp32-head",
        "actor": "python -m scalerl_generator.actor --server http://127.0.0.1:2 --listen 0.0.0.0:3 "
        "--advertise http://pod-0.svc:3",
        "trainer": "python -m scalerl_trainer.main --listen 0.0.0.0:1",
    }


def test_server_is_given_options_and_memory_for_drafts() -> None:
    generator = {"kvCache": "1Gi", "adaptiveConcurrency": True}
    generator |= {"speculation": {"history": {}}}
    (server,) = (
        container
        for workload in plan(run_spec(generator=generator)).workloads
        for container in workload.containers
        if container.name == "server"
    )
    line = " ".join(server.argv)
    assert line.endswith(
        "--kv-cache-bytes 1073741824 --stats --watermark 0.1 --max-draft-tokens 16 --draft-memory-tokens 7340032"
    )
    assert server.resources.memory_bytes == 2**30 + 56 * 7_340_032


def test_server_holds_the_versions_that_leases_permit() -> None:
    lora = {
        "rank": 64,
        "publish": "Adapter",
        "inFlight": "FinishOnOwn",
        "targetModules": ["q_proj", "mlp.up_proj"],
    }
    made = plan(
        run_spec(trainer={"lora": lora}, recipe={"offPolicy": {"pipeline": {"maxStalenessSteps": 3}}})
    )
    server, _ = made.workload(Role.GENERATOR).containers
    assert " ".join(server.argv).endswith(
        "--lora-versions 5 --lora-rank 64 --lora-targets q_proj,mlp.up_proj"
    )
    server, _ = plan(run_spec(trainer={"lora": {"publish": "Adapter"}})).workload(Role.GENERATOR).containers
    assert "--lora-versions" not in server.argv


def test_server_reports_experts_for_router_replay() -> None:
    made = plan(run_spec(generator={"devices": 1}, trainer={"routerReplay": True}))
    server, _ = made.workload(Role.GENERATOR).containers
    assert "--routed-experts" in server.argv
    server, _ = plan(run_spec(generator={"devices": 1})).workload(Role.GENERATOR).containers
    assert "--routed-experts" not in server.argv


def test_workers_on_cpus_have_threads_and_a_cache_each() -> None:
    made = plan(run_spec(generator={"cpuWorkers": 2, "cpuThreads": 3, "kvCache": "1Gi"}))
    server, _ = made.workload(Role.GENERATOR).containers
    assert "--tensor-parallel 2" in " ".join(server.argv)
    assert server.resources == Resources(0, 6, 2 * 2**30)


def test_plan_sets_lifetimes_replicas_and_order() -> None:
    made = plan(run_spec(generator={"replicas": 3}, trainer={"replicas": 2}))
    assert [(w.role, w.lifetime, w.replicas) for w in made.workloads] == [
        (Role.PREPARE, Lifetime.ONCE, 1),
        (Role.COORDINATOR, Lifetime.SERVICE, 1),
        (Role.GENERATOR, Lifetime.SERVICE, 3),
        (Role.TRAINER, Lifetime.GANG, 2),
    ]


def test_resources_follow_the_spec() -> None:
    made = plan(
        run_spec(
            generator={"replicas": 2, "devices": 2, "cpuThreads": 3, "kvCache": "1Gi"},
            trainer={"replicas": 4, "devices": 1},
        )
    )
    server, actor = made.workload(Role.GENERATOR).containers
    assert (server.resources.devices, server.resources.cpu_threads) == (2, 3)
    assert server.resources.memory_bytes == 2**30
    assert actor.resources.devices == 0
    assert made.devices() == 8


def test_tools_of_equal_environments_are_started_for_each_scoring() -> None:
    def memory_bytes(*verifiers: str) -> int:
        environment = {"name": "tools", "parameters": {"tools": ["python"]}}
        mix = [
            {
                "name": f"t{at}",
                "weight": "0.5",
                "reasoningGym": {"name": "chain_sum", "size": 500},
                "verifier": {"name": name, "memory": "256Mi"},
                "heldOut": {"size": 4},
                "environment": environment,
            }
            for at, name in enumerate(verifiers)
        ]
        run = run_spec(task={"mix": mix})
        _, actor = plan(run).workload(Role.GENERATOR).containers
        assert actor.resources.memory_bytes is not None
        return actor.resources.memory_bytes

    once = memory_bytes("exact", "exact")
    assert memory_bytes("exact", "number") == 2 * once
    assert once == (256 << 20) + (2 << 30)


@pytest.mark.parametrize(
    ("trainer", "ranks", "per_node", "devices"),
    [
        ({"replicas": 3}, 3, 1, 0),
        ({"replicas": 3, "devices": 1}, 3, 1, 1),
        ({"replicas": 3, "devices": 2}, 6, 2, 1),
        ({"devices": 8}, 8, 8, 1),
    ],
)
def test_trainer_has_a_rank_per_device_of_each_node(
    trainer: dict[str, int], ranks: int, per_node: int, devices: int
) -> None:
    made = plan(run_spec(trainer=trainer))
    workload = made.workload(Role.TRAINER)
    (rank,) = workload.containers
    assert (workload.replicas, workload.per_node, rank.resources.devices) == (ranks, per_node, devices)
    assert made.devices() == ranks * devices


@pytest.mark.parametrize(
    ("model", "prepare_offline"),
    [({"scratch": {}}, True), ({"path": "/m"}, True), ({"hub": {"name": "a/b"}}, False)],
)
def test_only_prepare_of_a_hub_model_is_online(model: dict[str, object], prepare_offline: bool) -> None:
    for workload in plan(run_spec(model=model)).workloads:
        for container in workload.containers:
            offline = container.env.get("HF_HUB_OFFLINE") == "1"
            assert offline is (prepare_offline or workload.role is not Role.PREPARE)
            assert container.env["VLLM_NO_USAGE_STATS"] == "1"
            assert container.env["TOKENIZERS_PARALLELISM"] == "false"


def test_cpu_trainer_has_its_accelerator_variable() -> None:
    on_cpu = plan(run_spec()).workload(Role.TRAINER).containers[0].env
    on_gpu = plan(run_spec(trainer={"devices": 1})).workload(Role.TRAINER).containers[0].env
    assert on_cpu["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in on_gpu


def test_probes_name_ports_and_arguments_can_be_expanded() -> None:
    for workload in plan(run_spec()).workloads:
        for container in workload.containers:
            variables = {k: v for k, v in GIVEN.items() if not k.startswith("SCALERL_PORT")}
            shared = [p for c in workload.containers for p in c.ports]
            variables |= {port_variable(port): "1" for port in shared}
            for text in [*container.argv, *container.env.values()]:
                expand(text, variables)
            for probe in (container.startup, container.liveness, container.readiness):
                assert probe is None or probe.port in container.ports


def test_plan_is_deterministic() -> None:
    assert plan(run_spec(seed=3)) == plan(run_spec(seed=3))


def test_plan_is_independent_of_the_runtime() -> None:
    text = repr(plan(run_spec()))
    assert "0.0.0.0" not in text
    assert "/usr" not in text


@given(
    st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=8)), st.text()
)
def test_expand_replaces_each_variable_once(variables: dict[str, str], tail: str) -> None:
    text = "|".join(f"$({name})" for name in variables) + literal(tail)
    assert expand(text, variables) == "|".join(variables.values()) + tail


def test_literal_text_is_never_expanded() -> None:
    argv = (
        plan(run_spec(generator={"extraArgs": ["--hf-token=$(HOME)$"]}))
        .workload(Role.GENERATOR)
        .containers[0]
        .argv
    )
    assert expand(argv[-1], {}) == "--hf-token=$(HOME)$"


def test_expand_refuses_an_unknown_variable() -> None:
    with pytest.raises(KeyError, match="NOPE"):
        expand("x$(NOPE)", {"A": ""})
