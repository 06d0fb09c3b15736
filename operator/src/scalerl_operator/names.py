"""Names and labels of a run's objects, and paths and ports in its pods. Pure.

All names of a run start with its stem. The stem is the run's name if that is a DNS label that starts with a letter, of at most 40
characters (the name of a StatefulSet may have 52, since its pods have a label with the name and a hash; the hostname of a
trainer's rank may have 63 and ends with attempt and index). Any other name is shortened and gets a hash of the whole name, so
that two runs never share a stem.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from scalerl_api.spec import GROUP
from scalerl_lifecycle.workloads import Role

FIELD_OWNER: Final = "scalerl-operator"
AUTOSCALER: Final = "scalerl-autoscaler"
"""Field manager of ``spec.generator.replicas``, as an HPA has its own."""

RUN: Final = f"{GROUP}/run"
"""Label on every object of a run: the run's name, shortened if it is long."""
RUN_UID: Final = f"{GROUP}/run-uid"
"""Label on every object of a run: the run's uid, which distinguishes runs of one name."""
ATTEMPT: Final = f"{GROUP}/attempt"
"""Label on a trainer Job and its pods, and on the coordinator's pod: number of the attempt, from 1."""
COMPONENT: Final = "app.kubernetes.io/component"
"""Label: the role; ``run`` on objects of no role."""
SPEC_HASH: Final = f"{GROUP}/spec-hash"
"""Annotation of pods and of their Jobs: hash of the part of the spec that they depend on."""
RENDERED_HASH: Final = f"{GROUP}/rendered"
"""Annotation on every object: hash of the rendered object, to detect the removal of a field too."""
IMAGE: Final = f"{GROUP}/image"
"""Annotation of workloads: the operator's image for the role at the start of the run, unless ``spec.images`` names one."""
SCALED_BY: Final = f"{GROUP}/scaled-by-decision"
"""Annotation of a run: number of the decision that last set ``spec.generator.replicas``."""
FINALIZER: Final = f"{GROUP}/drain"
QUEUE: Final = "kueue.x-k8s.io/queue-name"
PRIORITY: Final = "kueue.x-k8s.io/priority-class"
QUEUE_LABELS: Final = (QUEUE, PRIORITY)
"""Kueue's labels, copied from the run to what it queues."""
EXTRA: Final = f"{GROUP}/extra"
"""Label on the generators beyond the gang of a queued run."""
ABANDON: Final = f"{GROUP}/abandon-steps"
"""Annotation by which the user abandons a lost claim: the number of trained steps."""
ENDED: Final = f"{GROUP}/ended"
"""Label on the record of a run that was deleted: the run's name, shortened if it is long."""
SCRAPE: Final = f"{GROUP}/scrape"
"""Label of a namespace whose pods may scrape the metrics of runs: ``scalerl.dev/scrape: "true"`` on that of Prometheus."""

PORTS: Final = {"http": 8080, "control": 8081, "vllm": 8000}
"""Numbers of the named ports of containers, except that of environment servers, which the spec has."""
MASTER_PORT_NUMBER: Final = 29500

RUN_DIR: Final = "/run/scalerl/run"
MODELS_DIR: Final = "/run/scalerl/models"
"""The claim of ``model.cache``, at one path in all containers, since the run's model has links to it."""
SOURCE_DIR: Final = "/run/scalerl/source"
"""The directory of the run ``spec.from.run``, read-only, in the preparation."""
COMPILE_CACHE_DIR: Final = "/run/scalerl/compile-cache"
"""Of ``generator.compileCache``, in the container of the vLLM server only."""
SPEC_DIR: Final = "/etc/scalerl/spec"
SPEC_KEY: Final = "run.yaml"
TOKEN_DIR: Final = "/etc/scalerl/token"
TOKEN_KEY: Final = "token"

MAX_STEM: Final = 40
MAX_LABEL: Final = 63
_STEM = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SHORTENED = re.compile(r"-x[0-9a-f]{8}$")
"""Suffix of a shortened name. A user's name with such a suffix is shortened too, since it could be the stem of another run."""


def _shortened(start: str, whole: str, limit: int) -> str:
    ending = f"-x{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return start[: limit - len(ending)].rstrip("-.") + ending


def stem(run: str) -> str:
    """Prefix of the names of a run's objects.

    >>> stem("tiny-addition"), stem("v1.5-math")
    ('tiny-addition', 'v1-5-math-xfb2b870b')
    """
    if _STEM.fullmatch(run) and len(run) <= MAX_STEM and not _SHORTENED.search(run):
        return run
    start = run.replace(".", "-")
    return _shortened(start if start[0].isalpha() else f"run-{start}", run, MAX_STEM)


def label_value(run: str) -> str:
    """The run's name as a label value, shortened and with a hash beyond 63 characters."""
    return run if len(run) <= MAX_LABEL and not _SHORTENED.search(run) else _shortened(run, run, MAX_LABEL)


def labels(run: str, uid: str, component: str = "run") -> dict[str, str]:
    """Labels of every object of a run."""
    return {
        "app.kubernetes.io/name": "scalerl",
        "app.kubernetes.io/instance": label_value(run),
        COMPONENT: str(component),
        "app.kubernetes.io/managed-by": FIELD_OWNER,
        RUN: label_value(run),
        RUN_UID: uid,
    }


def selector(uid: str, component: str | None = None) -> dict[str, str]:
    """Labels that select the pods of a run, or of one of its roles, and none of an earlier run of the same name."""
    return {RUN_UID: uid} | ({} if component is None else {COMPONENT: str(component)})


class Names:
    """Names of the objects of one run."""

    def __init__(self, run: str) -> None:
        self.stem = stem(run)
        self.claim = f"{self.stem}-data"
        """The volume claim that the operator creates."""
        self.spec = f"{self.stem}-spec"
        """ConfigMap with the run file."""
        self.token = f"{self.stem}-token"
        """Secret with the run's bearer token."""
        self.curve = f"{self.stem}-curve"
        """ConfigMap with the points of the curve."""
        self.network = f"{self.stem}-run"
        """NetworkPolicy of all pods."""
        self.prepare = f"{self.stem}-{Role.PREPARE}"
        self.coordinator = f"{self.stem}-{Role.COORDINATOR}"
        """StatefulSet and Service."""
        self.generator = f"{self.stem}-{Role.GENERATOR}"
        """Deployment and PodDisruptionBudget."""
        self.extra_generators = f"{self.generator}-extra"
        """Deployment of the generators beyond the gang of a queued run."""
        self.environment = f"{self.stem}-{Role.ENVIRONMENT}"
        """Deployment, headless Service and NetworkPolicy of environment servers."""
        self.extra_environments = f"{self.environment}-extra"
        """Deployment of those beyond the gang of a queued run."""
        self.workload = f"{self.stem}-run"
        """Kueue's Workload of a queued run."""
        self.trainer = f"{self.stem}-{Role.TRAINER}"
        """Headless Service of all attempts."""

    def trainer_job(self, attempt: int) -> str:
        """Job of one attempt; ``-<rank>`` is appended for the hostnames of its pods."""
        return f"{self.trainer}-{attempt}"

    def coordinator_url(self, namespace: str) -> str:
        return f"http://{self.coordinator}.{namespace}.svc:{PORTS['http']}"

    def environment_url(self, namespace: str, port: int) -> str:
        return f"http://{self.environment}.{namespace}.svc:{port}"

    def master(self, namespace: str, attempt: int) -> str:
        """Host name of rank 0, different for each attempt, so that a late rank of an earlier attempt cannot connect."""
        return f"{self.trainer_job(attempt)}-0.{self.trainer}.{namespace}.svc"
