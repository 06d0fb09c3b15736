"""Data sets as files of tests."""

import json

from scalerl_api.dataset_source import DatasetSource as DatasetSpec
from scalerl_tasks import open_dataset


def spec(*files, **fields):
    return DatasetSpec.model_validate({"files": list(files)} | fields)


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def opened(tmp_path, rows, **fields):
    """A data set of these rows, as a JSON Lines file, in a run's directory."""
    write_lines(tmp_path / "d.jsonl", rows)
    return open_dataset(spec("d.jsonl", **fields), tmp_path)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "so #### 72", "question": "How many?"},
}
