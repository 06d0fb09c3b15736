"""Memory of containers by the model's size, and warnings of amounts in podTemplate that are below it."""

from __future__ import annotations

from collections.abc import Iterator

from kubernetes.utils.quantity import parse_quantity

from scalerl_api.load import SpecProblem
from scalerl_api.memory.containers import container_bytes, has_estimate, pod_bytes
from scalerl_api.memory.model_size import ModelSize
from scalerl_lifecycle.workloads import Role
from scalerl_operator.manifests.scope import SECTION, Scope, pod_template_of
from scalerl_operator.manifests.volumes import shared_memory_bytes


def bytes_of_pod(scope: Scope, container: str) -> int:
    """Memory of a pod beside its processes; 0 while the model's size is not known."""
    return 0 if scope.size is None else pod_bytes(container, scope.size, scope.spec)


def estimate(scope: Scope, container: str) -> int:
    """Memory of one process of a container by the model's size; 0 where that is not known, or does not matter."""
    scratch = scope.spec.model.scratch
    size = ModelSize.of_scratch(scratch) if container == "prepare" and scratch is not None else scope.size
    return container_bytes(container, size, scope.spec) if size is not None and has_estimate(container) else 0


def memory_warnings(scope: Scope) -> Iterator[SpecProblem]:
    """Amounts of memory in podTemplate that are below the estimate by the model's size. The preparation has the trainer's
    podTemplate: of the two, the warning with the larger estimate."""
    if scope.size is None:
        return
    found: dict[tuple[str, str], tuple[int, SpecProblem]] = {}
    for role in (Role.PREPARE, Role.GENERATOR, Role.TRAINER):
        workload, given = scope.plan.workload(role), pod_template_of(scope.spec, role)
        name = workload.containers[0].name
        needed = workload.per_node * estimate(scope, name) + shared_memory_bytes(given, workload)
        for kind in ("limits", "requests"):
            amount = getattr(given.resources, kind).get("memory")
            if amount is None or _is_enough(amount, needed):
                continue
            own = getattr(scope.spec, SECTION[role]).pod_template
            section = (
                "" if own is None or "memory" not in getattr(own.resources, kind) else f"{SECTION[role]}."
            )
            problem = SpecProblem(
                f"spec.{section}podTemplate.resources.{kind}.memory",
                f"{amount} is below the estimate of {needed / 2**30:.1f}Gi for the container {name} with this model "
                f"({scope.size.parameters / 1e6:,.0f} M parameters)",
                "raise it, or leave it out",
            )
            key = (SECTION[role], problem.where)
            found[key] = max(found.get(key, (0, problem)), (needed, problem), key=lambda one: one[0])
            break
    yield from (problem for _, problem in found.values())


def _is_enough(amount: object, needed: int) -> bool:
    """Whether an amount of memory is at least ``needed`` bytes. What is no quantity gets no warning: the API server reports it."""
    try:
        return bool(parse_quantity(str(amount)) >= needed)  # type: ignore[no-untyped-call]
    except (ValueError, ArithmeticError):
        return True
