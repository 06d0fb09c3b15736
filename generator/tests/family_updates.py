"""``python family_updates.py FAMILY...``: weight updates of in-process vLLM engines, one after the other.

For each family it prints a JSON line with the greatest difference of prompt log-probabilities after each of several updates:
to transformers with the same weights, or, after a publish of the weights that vLLM loaded and after an aborted update, to
those before it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from safetensors.torch import load_file
from vllm_with_updates import BUCKET_BYTES, Sender, TensorSource, receive

from scalerl_generator.server.server_options import ServerOptions
from scalerl_generator.server.start_environment import prepared_environment

TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, tiny_models.VOCABULARY, 60)]


class Engine:
    """A vLLM engine in this process, with the worker extension and the weight engine of a run's servers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from vllm import LLM

        gc.freeze()  # what is imported; the collection of `close` would visit it each time
        self.llm: Any = LLM(
            str(folder),
            dtype=dtype,
            max_model_len=tiny_models.CONTEXT_TOKENS,
            max_num_seqs=8,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            generation_config="vllm",
            distributed_executor_backend="uni",
            worker_extension_cls="scalerl_generator.vllm_worker.WorkerExtension",
            weight_transfer_config={"backend": "scalerl"},
            hf_overrides={"head_dtype": "float32"},
            enable_prefix_caching=False,
        )

    def call(self, method: str, **arguments: Any) -> Any:
        (result,) = self.llm.collective_rpc(method, kwargs=arguments)
        return result

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()

    def logprobs(self) -> np.ndarray[Any, Any]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)
        scores = output.prompt_logprobs[1:]
        return np.array([row[token].logprob for row, token in zip(scores, TOKENS[1:], strict=True)])

    def update(
        self, source: TensorSource, version: int, *, damaged_bucket: int | None = None, abort: bool = False
    ) -> dict[str, Any]:
        """Join a new group, receive ``source``; returns the worker's report."""
        sender = Sender(version)
        opening = threading.Thread(target=sender.open, daemon=True)
        opening.start()
        join = sender.join()
        self.call("init_weight_transfer_engine", init_info=_fields(join))
        opening.join(60)
        while (problem := self.call("scalerl_join_problem", epoch=str(join.epoch))) is None:
            time.sleep(0.01)
        assert not problem, problem
        self.call("start_weight_update")

        def send() -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the worker has left the group; its report has the reason
                sender.send(source, version, damaged_bucket)

        sending = threading.Thread(target=send, daemon=True)
        if not abort:
            sending.start()
        info = _fields(receive(source, version, version, 60.0)) | {"abort": abort}
        self.call("update_weights", update_info=info)
        self.call("finish_weight_update")
        return dict(self.call("scalerl_publish_report"))


def _fields(message: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(message))


def scored(folder: Path, dtype: str) -> np.ndarray[Any, Any]:
    """transformers' log-probabilities of :data:`TOKENS`, with the head in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([TOKENS])).last_hidden_state[0]
        logits = hidden.float() @ model.get_output_embeddings().weight.float().T
    logprobs = torch.log_softmax(logits, -1)[:-1]
    return logprobs.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


def measure(family: str, dtype: str, root: Path) -> dict[str, Any]:
    begin = time.monotonic()
    kind = getattr(torch, dtype)
    folders = [tiny_models.write(family, root / f"{family}-{i}", dtype=kind, seed=i) for i in range(3)]
    sources = [TensorSource(load_file(folder / "model.safetensors")) for folder in folders]
    wanted = [scored(folder, dtype) for folder in folders]
    engine = Engine(folders[0], dtype)

    def difference(expected: np.ndarray[Any, Any]) -> float:
        return float(np.abs(engine.logprobs() - expected).max())

    loaded = engine.logprobs()
    found: dict[str, Any] = {"family": family, "dtype": dtype, "loaded": difference(wanted[0])}
    reports = [engine.update(sources[0], 1)]
    found["same again"] = difference(loaded)
    reports.append(engine.update(sources[1], 2))
    found["other"] = difference(wanted[1])
    current = engine.logprobs()
    log_ratio = wanted[1] - current
    found["kl"] = float(np.mean(np.expm1(log_ratio) - log_ratio))
    reports.append(engine.update(sources[2], 3, abort=True))
    found["aborted"] = difference(current)
    reports.append(engine.update(sources[2], 4, damaged_bucket=1))
    reports.append(engine.update(sources[2], 5))
    found["after a partial one"] = difference(wanted[2])
    reports.append(engine.update(sources[0], 6))
    found["back"] = difference(wanted[0])
    unknown = TensorSource({f"model.layers.0.unknown.{n}": t for n, t in sources[0].tensors.items()})
    reports.append(engine.update(unknown, 7))
    first = dict(list(sources[0].tensors.items())[:-2])
    reports.append(engine.update(TensorSource(first), 8))
    found["changed"] = float(np.abs(wanted[1] - wanted[0]).max())
    found["states"] = [report["state"] for report in reports]
    found["errors"] = [report["error"] for report in reports]
    found["tensors"] = [report["tensors"] for report in reports]
    engine.close()
    found["seconds"] = round(time.monotonic() - begin, 1)
    return found


def main() -> None:
    dtype, *families = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        for family in families:
            try:
                found = measure(family, dtype, Path(root))
            except Exception as error:
                import traceback

                traceback.print_exc()
                found = {"family": family, "failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's own exit takes seconds


if __name__ == "__main__":
    if "SCALERL_VLLM_PREPARED" not in os.environ:
        torch_dir = Path(str(importlib.util.find_spec("torch").origin)).parent  # type: ignore[union-attr]
        options = ServerOptions(model="", port=0)
        env = prepared_environment(
            options, os.environ, True, torch_dir, Path.home() / ".cache/scalerl", cache_bytecode=False
        )
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], env)
    assert BUCKET_BYTES
    gc.disable()  # for imports; `close` collects
    main()
