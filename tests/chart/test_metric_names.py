"""Names of metrics follow Prometheus' conventions: https://prometheus.io/docs/practices/naming/"""

from __future__ import annotations

import itertools
import re

import pytest
from find_metrics import Registered, expositions, registered

# The client library names its own.
METRICS = [metric for metric in registered() if not metric.name.startswith("process_")]
PREFIXES = {
    "scalerl_coordinator_",
    "scalerl_trainer_",
    "scalerl_actor_",
    "scalerl_curvefit_",
    "scalerl_operator_",
}
# What the scrape says about a series; a metric that says the same is renamed `exported_...`.
TARGET = {"job", "instance", "pod", "container", "node", "role"}
BASE_UNITS = {
    "milliseconds": "seconds",
    "minutes": "seconds",
    "hours": "seconds",
    "ms": "seconds",
    "mb": "bytes",
    "kib": "bytes",
    "percent": "fraction",
}


def named(metric: Registered) -> str:
    return metric.name


def test_every_process_exports_memory_and_cpu():
    """A `_created` series beside each counter and histogram doubles what Prometheus stores, and nothing reads it."""
    shown = expositions()
    assert len(shown) == len(PREFIXES)
    for text in shown:
        assert "\nprocess_resident_memory_bytes " in text
        assert "\nprocess_cpu_seconds_total " in text
        assert "_created" not in text


def test_no_name_is_registered_twice():
    names = [metric.name for metric in METRICS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("metric", METRICS, ids=named)
def test_metric_names_have_component_and_unit(metric):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert any(metric.name.startswith(prefix) for prefix in PREFIXES)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))
    for word in metric.name.split("_"):
        assert word not in BASE_UNITS, f"use {BASE_UNITS[word]}"


@pytest.mark.parametrize("metric", METRICS, ids=named)
def test_every_metric_is_explained(metric):
    assert len(metric.help.split()) >= 2


@pytest.mark.parametrize("metric", METRICS, ids=named)
def test_labels_are_few_and_not_the_targets(metric):
    assert len(metric.labels) <= 4
    assert not metric.labels & TARGET
    for label in metric.labels:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", label)


@pytest.mark.parametrize("metric", [m for m in METRICS if m.kind == "histogram"], ids=named)
def test_histogram_buckets_span_two_decades(metric):
    buckets = metric.buckets
    assert list(buckets) == sorted(set(buckets))
    assert 6 <= len(buckets) <= 16
    positive = [bucket for bucket in buckets if bucket > 0]
    assert positive[-1] / positive[0] >= 50
    if metric.name.endswith("_seconds"):
        # A jump of more than 5 times between two buckets would make a quantile meaningless.
        assert all(b / a <= 5 for a, b in itertools.pairwise(positive))
