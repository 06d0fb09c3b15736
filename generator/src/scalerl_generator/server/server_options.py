"""Options of the server of a run, and the command line of vLLM that they become."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from scalerl_api.lora import reserved_rank
from scalerl_api.registry import Kind, PluginError, entry_point
from scalerl_api.vllm_options import HEAD_MESSAGE, HEAD_TYPE, OVERRIDES_OPTION, free_option, option_name
from scalerl_generator.drafts.draft_protocol import DRAFTER, MEMORY_TOKENS

PLUGIN = "scalerl"
"""Name of the entry point of ``vllm.general_plugins``, and of the weight-transfer engine that it registers."""

CPU_BLOCK_TOKENS, BLOCK_TOKENS = 128, 16
"""Tokens of a block of vLLM's KV cache on CPUs (of MLA models fewer) and, at least, on devices, without ``--block-size`` (vLLM 0.32)."""


class ServerProblem(Exception):
    """The server cannot start with these options; the message says what to change."""


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the vLLM server that depend on the run; all others are constants of :func:`vllm_arguments`."""

    model: str
    port: int
    host: str = "127.0.0.1"
    dtype: str = "auto"
    fp32_head: bool = True
    """Compute the LM head in float32, as the trainer does."""
    max_model_len: int = 1024
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; None: 256 MiB on CPUs, the rest of ``memory_fraction`` on GPUs."""
    watermark: float = 0.0
    """Fraction of the KV cache that stays free when a sequence is admitted, so that running sequences can grow."""
    memory_fraction: float = 0.9
    """GPU only: fraction of the device's memory that vLLM may use."""
    threads: int = 1
    """CPU only: OpenMP threads of the worker."""
    tensor_parallel: int = 1
    prefix_caching: bool = True
    routed_experts: bool = False
    """Report the experts that the routers chose; vLLM's build for CPUs cannot."""
    seed: int = 0
    """The run's seed, from which each start derives another one (:mod:`.sampling_seed`)."""
    max_draft_tokens: int = 0
    """Maximum draft length of speculative decoding from past responses (:mod:`.drafter`); 0 turns it off."""
    draft_memory_tokens: int = 4_000_000
    """Capacity of the drafter's memory in tokens, 56 bytes each."""
    lora_versions: int = 0
    """Number of versions of published adapters (LoRA) that are sampled with concurrently; 0: updates replace the weights."""
    lora_rank: int = 1
    """Of these adapters."""
    lora_targets: str = ""
    """Names of the layers that have them, or ends of their names, separated by commas; empty: all linear layers but the output embedding."""
    drafter: str = ""
    """The drafter of an installed package, as the JSON of ``history.drafter``; empty: :class:`.drafter.Drafter`."""
    stats: bool = False
    """Serve vLLM's own metrics at ``/metrics``; they add time to every step."""
    log_level: str = "warning"
    extra: tuple[str, ...] = ()
    """Appended to vLLM's command line; ``--hf-overrides`` is merged (:func:`overrides`)."""


def parse(argv: Sequence[str]) -> ServerOptions:
    """Parse the command line; names and defaults are those of :class:`ServerOptions`.

    Raises:
        ServerProblem: an argument for vLLM that a run must not give it, as the run's validation says.
    """
    p = argparse.ArgumentParser(
        prog="python -m scalerl_generator.vllm_server", description="vLLM for one run"
    )
    p.add_argument("--model", required=True, help="directory with config, tokenizer and weights")
    p.add_argument("--port", type=int, required=True)
    for one in fields(ServerOptions):
        if one.name in ("model", "port", "extra"):
            continue
        kind: dict[str, Any] = {"type": int if one.default is None else type(one.default)}
        if isinstance(one.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        p.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, **kind)
    p.add_argument("extra", nargs="*", help="after --: arguments for vLLM itself")
    values = vars(p.parse_args(argv))
    try:
        for argument in values["extra"]:
            free_option(argument)
    except ValueError as error:
        raise ServerProblem(f"generator.extraArgs: {error}") from None
    if values["drafter"]:
        try:
            entry_point(Kind.DRAFTER, json.loads(values["drafter"])["name"])
        except PluginError as error:
            raise ServerProblem(f"generator.speculation.history.drafter: {error}") from None
    return ServerOptions(**values | {"extra": tuple(values["extra"])})


def vllm_arguments(options: ServerOptions, on_cpu: bool, seed: int = 0) -> list[str]:
    """The command line for vLLM's own parser. ``seed`` is that of this start, not the run's.

    Log-probabilities are those of the sampling distribution (``processed_logprobs``: after temperature and
    truncation). Sampling defaults are vLLM's, not those of the model's files.
    """
    argv = [
        *("--model", options.model, "--host", options.host, "--port", str(options.port)),
        *("--dtype", options.dtype, "--max-model-len", str(options.max_model_len)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--tensor-parallel-size", str(options.tensor_parallel), "--seed", str(seed)),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", json.dumps({"backend": PLUGIN})),
        *("--worker-extension-cls", "scalerl_generator.vllm_worker.WorkerExtension"),
        *("--middleware", "scalerl_generator.server.require_token.RequireToken"),
        "--enable-scale-out",
        "--enable-prefix-caching" if _caches_prefixes(options, on_cpu) else "--no-enable-prefix-caching",
        *("--disable-fastapi-docs", "--disable-uvicorn-access-log"),
        *("--uvicorn-log-level", options.log_level),
        # With development endpoints vLLM logs one error for each request in flight, each time with a longer stack:
        # 30,000 lines for 60 requests. The engine and the output handler log it once anyway.
        "--no-log-error-stack",
    ]
    if options.watermark:
        argv += ["--watermark", str(options.watermark)]
    if not options.stats:
        argv.append("--disable-log-stats")
    if options.routed_experts:
        argv.append("--enable-return-routed-experts")
    kv_cache_bytes = options.kv_cache_bytes or (256 << 20 if on_cpu else None)
    if kv_cache_bytes is not None:
        argv += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    else:
        argv += ["--gpu-memory-utilization", str(options.memory_fraction)]
    if options.max_draft_tokens:
        speculation = {
            "method": "custom_class",
            "model": "scalerl_generator.drafts.vllm_proposer.HistoryProposer",
            "num_speculative_tokens": options.max_draft_tokens,
        }
        argv += ["--speculative-config", json.dumps(speculation)]
        argv += ["--additional-config", json.dumps(_drafts(options))]
    if options.lora_versions:
        rank = str(reserved_rank(options.lora_rank))
        argv += ["--enable-lora", "--max-loras", str(options.lora_versions), "--max-lora-rank", rank]
        if options.lora_targets:
            # vLLM compares last parts of names, or whole ones, which of some models are not those in the files.
            kinds = {target.rpartition(".")[2] for target in options.lora_targets.split(",")}
            argv += ["--lora-target-modules", *sorted(kinds)]
    if on_cpu:
        argv.append("--enforce-eager")  # compilation needs a C++ compiler and takes minutes
        if options.tensor_parallel == 1:
            argv += ["--distributed-executor-backend", "uni"]
    return [*argv, *options.extra]


def _caches_prefixes(options: ServerOptions, on_cpu: bool) -> bool:
    """Whether the prefix cache is used. It has full blocks only: if no sequence fills one, each is looked up in vain."""
    sized = any(option_name(argument) == "--block-size" for argument in options.extra)
    fills_a_block = options.max_model_len > (CPU_BLOCK_TOKENS if on_cpu else BLOCK_TOKENS)
    # vLLM keeps the experts of cached tokens by their blocks, and refuses to report any without the cache.
    return options.routed_experts or (options.prefix_caching and (fills_a_block or sized))


def _drafts(options: ServerOptions) -> dict[str, Any]:
    """vLLM's ``--additional-config``, from which the proposer reads its settings."""
    drafter = {DRAFTER: json.loads(options.drafter)} if options.drafter else {}
    return {MEMORY_TOKENS: options.draft_memory_tokens} | drafter


def overrides(options: ServerOptions, given: object) -> dict[str, Any]:
    """``--hf-overrides``: those that vLLM's parser read from ``options.extra``, and over them the type of the LM head.

    Raises:
        ServerProblem: they have that type too, are no JSON object, or are given twice, of which vLLM would drop one.
    """
    forms = ["." in x.split("=", 1)[0] for x in options.extra if option_name(x) == OVERRIDES_OPTION]
    if len(forms) > 1 and not all(forms):
        raise ServerProblem(f"generator.extraArgs: {OVERRIDES_OPTION} is given twice: write one JSON object")
    if not isinstance(given, dict):
        raise ServerProblem(f"generator.extraArgs: {OVERRIDES_OPTION} must be a JSON object")
    if HEAD_TYPE in given:
        raise ServerProblem(f"generator.extraArgs: {HEAD_MESSAGE}")
    return given | ({HEAD_TYPE: "float32"} if options.fp32_head else {})
