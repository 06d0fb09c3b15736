"""The curve's ConfigMap: the table of the run's directory, whole where it fits."""

from __future__ import annotations

from coordinator_statuses import evaluations
from msgspec.structs import replace

from operator_tests.manifests import UID, cluster_run
from scalerl_api.curve import CURVE_COLUMNS, curve_csv
from scalerl_operator.manifests import storage
from scalerl_operator.manifests.storage import CURVE_DIGEST, CURVE_LEFT_OUT, curve_config_map

RUN = cluster_run()
POINTS = evaluations([0.2, 0.31, 0.4])


def test_curve_config_map_holds_the_table_and_is_owned_by_the_run() -> None:
    made = curve_config_map(RUN, UID, POINTS)
    assert made["data"] == {"curve.csv": curve_csv(POINTS)}
    header, *rows = made["data"]["curve.csv"].splitlines()
    assert header.split(",") == list(CURVE_COLUMNS)
    assert rows[1] == "100000,0.31,4000,0.01,10,100.000,400.000,50.000,0.020000,false,first set,1000,0"
    metadata = made["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("math-curve", "ml")
    assert metadata["labels"]["scalerl.dev/run-uid"] == metadata["ownerReferences"][0]["uid"] == UID
    assert CURVE_LEFT_OUT not in metadata["annotations"]


def test_curve_digest_changes_with_the_points() -> None:
    changed = [*POINTS[:2], replace(POINTS[2], reward=0.41)]
    one, same, other = (
        curve_config_map(RUN, UID, points)["metadata"]["annotations"][CURVE_DIGEST]
        for points in (POINTS, list(POINTS), changed)
    )
    assert one == same != other
    assert one


def test_curve_config_map_thins_out_a_long_curve() -> None:
    points = evaluations([0.5] * 30_000)
    made = curve_config_map(RUN, UID, points)
    table = made["data"]["curve.csv"]
    assert len(table) <= storage.MAX_CURVE_BYTES
    _, *rows = table.splitlines()
    assert len(rows) > 8_000
    assert made["metadata"]["annotations"][CURVE_LEFT_OUT] == str(30_000 - len(rows))
    versions = [int(row.split(",")[4]) for row in rows]
    assert (versions[0], versions[-1]) == (0, points[-1].version)
    assert versions == sorted(set(versions))
