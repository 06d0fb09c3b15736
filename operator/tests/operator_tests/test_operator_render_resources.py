"""Resource requests and limits of pods."""

from __future__ import annotations

from operator_tests.manifests import (
    cluster_run,
    container,
    environment,
    rendered,
)
from scalerl_operator.kube.types import Object


def test_devices_are_requested_and_limited_by_resource_name() -> None:
    run = cluster_run(
        deviceResource="amd.com/gpu", generator={"devices": 4}, trainer={"devices": 1, "cpuThreads": 6}
    )
    objects = rendered(run)
    assert container(objects["Deployment/generator"], "server")["resources"] == {
        "requests": {"cpu": "1", "memory": "1024Mi", "amd.com/gpu": "4"},
        "limits": {"amd.com/gpu": "4"},
    }
    assert container(objects["Job/trainer"], "trainer")["resources"] == {
        "requests": {"cpu": "6", "memory": "1024Mi", "amd.com/gpu": "1"},
        "limits": {"amd.com/gpu": "1"},
    }
    for key, name in (("Deployment/generator", "actor"), ("Job/prepare", "prepare")):
        assert "limits" not in container(objects[key], name)["resources"]


def test_trainer_pod_requests_what_its_ranks_need_together() -> None:
    """Also the shared memory, which counts against the container's memory: a GiB a rank where the spec names none."""
    job = rendered(cluster_run(trainer={"replicas": 2, "devices": 4, "cpuThreads": 3}))["Job/trainer"]
    assert container(job, "trainer")["resources"] == {
        "requests": {"cpu": "12", "memory": "8192Mi", "nvidia.com/gpu": "4"},
        "limits": {"nvidia.com/gpu": "4"},
    }
    assert shared_memory(job) == {"medium": "Memory", "sizeLimit": "4Gi"}


def test_trainer_pod_requests_the_shared_memory_of_the_spec() -> None:
    template = {"shmSize": "16Gi", "resources": {"limits": {"cpu": "32"}}}
    job = rendered(cluster_run(trainer={"devices": 8, "podTemplate": template}))["Job/trainer"]
    assert container(job, "trainer")["resources"] == {
        "requests": {"cpu": "32", "memory": "24576Mi", "nvidia.com/gpu": "8"},
        "limits": {"cpu": "32", "nvidia.com/gpu": "8"},
    }
    assert shared_memory(job) == {"medium": "Memory", "sizeLimit": "16Gi"}


def test_pod_with_one_process_keeps_a_gib_of_shared_memory() -> None:
    for key, workload in rendered(cluster_run(trainer={"devices": 1})).items():
        if key in ("Job/trainer", "Deployment/generator", "Job/prepare"):
            assert shared_memory(workload)["sizeLimit"] == "1Gi"


def shared_memory(workload: Object) -> Object:
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    found: Object = next(v for v in volumes if v["name"] == "scalerl-shm")["emptyDir"]
    return found


def test_cpu_threads_set_the_request_and_omp_num_threads() -> None:
    objects = rendered(cluster_run(generator={"cpuThreads": 3, "kvCache": "512Mi"}))
    server = container(objects["Deployment/generator"], "server")
    assert server["resources"] == {"requests": {"cpu": "3", "memory": "1536Mi"}}
    assert environment(server)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(container(objects["Job/trainer"], "trainer"))


def test_pod_template_resources_override_those_of_the_main_container() -> None:
    given = {"requests": {"cpu": "0.5"}, "limits": {"memory": "2048Mi", "rdma/ib": 1}}
    objects = rendered(cluster_run(podTemplate={"resources": given}, trainer={"devices": 1}))
    assert container(objects["Job/trainer"], "trainer")["resources"] == {
        "requests": {"cpu": "0.5", "memory": "2048Mi", "rdma/ib": "1", "nvidia.com/gpu": "1"},
        "limits": {"memory": "2048Mi", "rdma/ib": "1", "nvidia.com/gpu": "1"},
    }
    assert container(objects["Deployment/generator"], "actor")["resources"] == {
        "requests": {"cpu": "250m", "memory": "1280Mi"}
    }
    # The preparation uses no device, so it waits for none.
    assert container(objects["Job/prepare"], "prepare")["resources"] == {
        "requests": {"cpu": "0.5", "memory": "2048Mi"},
        "limits": {"memory": "2048Mi"},
    }
