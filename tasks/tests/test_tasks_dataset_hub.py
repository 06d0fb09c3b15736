"""Data sets of a hub: the real client against a server on loopback with the hub's API; revisions, access, cache;
which files a split has."""

import json
import os
import subprocess
import sys
import textwrap

import pyarrow
import pyarrow.parquet
import pytest
from dataset_hub_server import Hub, Repository

from scalerl_api.dataset_source import HubDataset
from scalerl_tasks import SourceError
from scalerl_tasks.dataset.hub import choose_files

OLD, NEW = "1" * 40, "2" * 40
CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n---\n"

READ = """
    import json, os, sys
    from pathlib import Path
    from scalerl_api.source import DatasetSource
    from scalerl_tasks import SourceError, open_dataset
    for case in json.loads(sys.argv[1]):
        os.environ.pop("HF_TOKEN", None)
        os.environ |= case.get("environ", {})
        try:
            source = open_dataset(DatasetSource(hub=case["hub"]), Path(case["directory"]))
            print(json.dumps([len(source), source[0].answer, source.table.info.revision]))
        except SourceError as error:
            print(json.dumps(str(error)))
"""


def rows(*answers):
    return "".join(json.dumps({"question": f"q{a}", "answer": f"#### {a}"}) + "\n" for a in answers).encode()


@pytest.fixture(scope="module")
def hub():
    files = {"README.md": CARD, "main/test-00000-of-00001.jsonl": rows(9)}
    old = files | {"main/train-00000-of-00001.jsonl": rows(1)}
    new = files | {"main/train-00000-of-00002.jsonl": rows(2, 3), "main/train-00001-of-00002.jsonl": rows(4)}
    with Hub() as made:
        made.repositories |= {
            "a/b": Repository({OLD: old, NEW: new}, {"main": NEW, "v1": OLD}),
            "a/gated": Repository({NEW: new}, {"main": NEW}, gated=True),
            "a/private": Repository({NEW: new}, {"main": NEW}, private=True),
            "a/plain": Repository({OLD: {"train.jsonl": rows(7), "loader.py": b""}}, {"main": OLD}),
            "a/code": Repository({OLD: {"loader.py": b""}}, {"main": OLD}),
        }
        yield made


def read(hub, cache, cases, **environ):
    """What opening each data set gives, by the client in a process of its own."""
    environ = {
        "HF_ENDPOINT": hub.url if hub is not None else "http://127.0.0.1:9",
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_ETAG_TIMEOUT": "60",
        **environ,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ), json.dumps(cases)],
        env={k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def case(tmp_path, name, token=None, **hub):
    directory = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    directory.mkdir()
    environ = {} if token is None else {"HF_TOKEN": token}
    return {"hub": {"name": name} | hub, "directory": str(directory), "environ": environ}


def test_hub_split_at_a_revision_then_from_the_cache_alone(tmp_path, hub):
    cases = [
        case(tmp_path, "a/b"),
        case(tmp_path, "a/b", split="test"),
        case(tmp_path, "a/b", revision="v1"),
        case(tmp_path, "a/b", revision=OLD),
        case(tmp_path, "a/plain"),
        case(tmp_path, "a/private", "hf_other"),
        case(tmp_path, "a/gated", "hf_accepted"),
    ]
    expected = [
        [3, "2", NEW],
        [1, "9", NEW],
        [1, "1", OLD],
        [1, "1", OLD],
        [1, "7", OLD],
        [3, "2", NEW],
        [3, "2", NEW],
    ]
    assert read(hub, tmp_path / "hf", cases) == expected
    assert f"GET /datasets/a/b/resolve/{NEW}/main/test-00000-of-00001.jsonl" in hub.requests
    # A run keeps its commit, whatever becomes of the branch, and of the hub.
    hub.repositories["a/b"].refs["main"] = OLD
    before = len(hub.requests)
    try:
        assert read(hub, tmp_path / "none", cases) == expected
        assert len(hub.requests) == before
    finally:
        hub.repositories["a/b"].refs["main"] = NEW
    again = [
        case(tmp_path, one["hub"]["name"], **{k: v for k, v in one["hub"].items() if k != "name"})
        for one in cases
    ]
    assert read(None, tmp_path / "hf", again, HF_HUB_OFFLINE="1") == expected
    # An interrupted download is no smaller data set.
    (part,) = (tmp_path / "hf").glob(f"**/datasets--a--b/snapshots/{NEW}/main/train-00001-of-00002.jsonl")
    part.unlink()
    (incomplete,) = read(None, tmp_path / "hf", [case(tmp_path, "a/b")], HF_HUB_OFFLINE="1")
    assert (
        "train-00001-of-00002.jsonl is not in the cache: download it first, or unset HF_HUB_OFFLINE"
        in incomplete
    )


def test_hub_refusals_say_what_to_do(tmp_path, hub):
    cases = {
        "access is restricted: accept its terms on its page, and set HF_TOKEN": [
            case(tmp_path, "a/gated"),
            case(tmp_path, "a/gated", "hf_other"),
        ],
        "not found, or private: check name and revision, or set HF_TOKEN": [
            case(tmp_path, "a/missing"),
            case(tmp_path, "a/missing", "hf_other"),
            case(tmp_path, "a/private"),
            case(tmp_path, "a/b", revision="v9"),
        ],
        "HF_TOKEN is not a valid token": [case(tmp_path, "a/b", "hf_wrong")],
        "main has no split 'dev'; set split to one of test, train": [case(tmp_path, "a/b", split="dev")],
        "has no configuration 'socratic'; set config to one of main": [
            case(tmp_path, "a/b", config="socratic")
        ],
        "no data files of split 'train'; its data files: none": [case(tmp_path, "a/code")],
    }
    said = iter(read(hub, tmp_path / "hf", [one for group in cases.values() for one in group]))
    for expected, group in cases.items():
        for one in group:
            text = next(said)
            name, revision = one["hub"]["name"], one["hub"].get("revision", "main")
            assert text.startswith(f"task.dataset.hub: {name} at revision {revision}: {expected}"), text
            assert "\n" not in text
    assert not list(tmp_path.glob("run-*/data/*"))


def test_hub_that_fails_or_cannot_be_reached(tmp_path, hub):
    hub.failing = True
    try:
        (down,) = read(hub, tmp_path / "hf", [case(tmp_path, "a/b")])
    finally:
        hub.failing = False
    (unreachable,) = read(None, tmp_path / "hf", [case(tmp_path, "a/b")])
    (offline,) = read(None, tmp_path / "hf", [case(tmp_path, "a/b")], HF_HUB_OFFLINE="1")
    assert "503" in down
    for text in (down, unreachable):
        assert text.endswith("check name, revision, network and access token")
    assert offline.endswith(
        "HF_HUB_OFFLINE is set and it is not in the cache: download it first, or unset the variable"
    )


HUB = HubDataset.model_validate({"name": "a/b"})


PARTS = [
    "main/train-00000-of-00001.parquet",
    "main/test-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
]


CONFIGS = [
    {
        "config_name": "main",
        "data_files": [{"split": "train", "path": "main/train-*"}, {"split": "test", "path": "main/test-*"}],
    },
    {"config_name": "socratic", "data_files": [{"split": "train", "path": "socratic/train-*"}]},
]


@pytest.mark.parametrize(
    ("names", "card", "hub", "found"),
    [
        (PARTS, {"configs": CONFIGS}, {"config": "main"}, [PARTS[0]]),
        (PARTS, {"configs": CONFIGS}, {"config": "main", "split": "test"}, [PARTS[1]]),
        (PARTS, {"configs": CONFIGS[:1]}, {}, [PARTS[0]]),
        (PARTS, {"configs": [CONFIGS[0], CONFIGS[1] | {"default": True}]}, {}, [PARTS[2]]),
        (PARTS, {}, {"config": "socratic"}, [PARTS[2]]),
        (PARTS, {"configs": CONFIGS}, {}, "has several configurations; set config to one of main, socratic"),
        (
            PARTS,
            {"configs": CONFIGS},
            {"config": "min"},
            "has no configuration 'min'; set config to one of main, socratic",
        ),
        (
            PARTS,
            {"configs": CONFIGS},
            {"config": "main", "split": "dev"},
            "no split 'dev'; set split to one of test, train",
        ),
        (PARTS, {}, {}, "has several configurations; set config to one of main, socratic"),
        (["README.md", "deepscaler.json"], {}, {}, ["deepscaler.json"]),
        (["x.jsonl.gz", "test.jsonl", "dataset_infos.json"], {}, {}, ["x.jsonl.gz"]),
        (["loader.py"], {}, {}, "no data files of split 'train'; its data files: none"),
        (["a.jsonl"], {"configs": [{"data_files": "a.jsonl"}]}, {}, ["a.jsonl"]),
    ],
)
def test_hub_files_of_a_split(names, card, hub, found):
    asked = HUB.model_copy(update=hub)
    if isinstance(found, str):
        with pytest.raises(SourceError) as caught:
            choose_files(names, card, asked, "task.dataset.hub: a/b")
        assert found in str(caught.value)
    else:
        assert choose_files(names, card, asked, "") == found


def test_hub_dataset_is_read_offline_at_its_commit(tmp_path):
    """From the hub's cache, by the hub's client; the commit is kept in the table."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub/datasets--openai--gsm8k"
    snapshot = repository / "snapshots" / commit
    (snapshot / "main").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n---\n# A card\n"
    (snapshot / "README.md").write_text(card)
    rows = [{"question": "q", "answer": "#### 3"}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), snapshot / "main/train-00000-of-00001.parquet"
    )
    code = """
        import sys
        from pathlib import Path
        from scalerl_api.source import DatasetSource
        from scalerl_tasks import SourceError, open_dataset
        for name in ("openai/gsm8k", "openai/other"):
            try:
                source = open_dataset(DatasetSource(hub={"name": name}), Path(sys.argv[1]))
                print(source[0].answer, source.table.info.revision)
            except SourceError as error:
                print(error)
    """
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    read, missing = done.stdout.splitlines()
    assert read == f"3 {commit}"
    assert "openai/other at revision main" in missing
    assert "HF_HUB_OFFLINE is set and it is not in the cache" in missing
