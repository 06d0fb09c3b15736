"""The options of vLLM's server, and what a run does with each: ``spec.generator.extraArgs``.

The table has every option of vLLM's own parser in the pinned release, with both forms of a switch (``--x`` and ``--no-x``), and
a test compares the two. An argument that starts with ``-`` must be one of the options that are passed on or merged, written in
full: vLLM's parser would resolve each unique prefix to its option, so a prefix of a refused option is that option.
``-``, ``_`` and fields of JSON options (``--option.field=value``) are those of vLLM's parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

VLLM_RELEASE: Final = "0.32"
"""The release whose options these are."""


class Use(StrEnum):
    """What becomes of an option in ``extraArgs``."""

    SET = "refused: set from other fields"
    BREAKS = "refused: not supported"
    MERGED = "merged"
    PASSED = "passed on"


@dataclass(frozen=True)
class Group:
    """Options with the same consequence for a run."""

    use: Use
    effect: str
    """What they do to a run's guarantees, and for refused ones which field to use or why."""
    written: str
    """The options; ``--[no-]x`` stands for a switch and its negation."""

    @property
    def options(self) -> tuple[str, ...]:
        found: list[str] = []
        for option in self.written.split():
            forms = (option.replace("[no-]", ""), option.replace("[no-]", "no-"))
            found += forms if "[no-]" in option else [option]
        return tuple(found)


GROUPS: Final = (
    Group(
        Use.SET,
        "`model`: `dtype`, `contextTokens`, and the folder that the preparation wrote; `seed`.",
        "--model --dtype --max-model-len --seed --config",
    ),
    Group(
        Use.SET,
        "`generator`: `maxConcurrentSequences`, `devices`, `memoryFraction`, `kvCache` (which a device without `kvCache` "
        "takes from `memoryFraction`).",
        "--max-num-seqs --tensor-parallel-size -tp --gpu-memory-utilization --device-memory-utilization "
        "--kv-cache-memory-bytes",
    ),
    Group(
        Use.SET,
        "The server listens on loopback only, for the actor beside it, and every request needs the run's token.",
        "--host --port --uds --api-key --middleware --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs "
        "--ssl-ciphers --[no-]enable-ssl-refresh",
    ),
    Group(
        Use.SET,
        "Sampling as the trainer computes it, and the transfer of weights.",
        "--logprobs-mode --generation-config --weight-transfer-config --worker-extension-cls --[no-]enable-scale-out",
    ),
    Group(
        Use.SET,
        "`trainer.routerReplay`.",
        "--[no-]enable-return-routed-experts",
    ),
    Group(
        Use.BREAKS,
        "Several engines, pipelines, hosts or processes, whose workers do not join the weight transfer; splits of experts and "
        "contexts. Devices of one server: `generator.devices`.",
        "--headless --api-server-count -asc --pipeline-parallel-size -pp --master-addr --master-port --nnodes -n "
        "--node-rank -r --distributed-executor-backend --device-ids --worker-cls "
        "--decode-context-parallel-size -dcp --dcp-comm-backend --[no-]dcp-q-replicate "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --prefill-context-parallel-size -pcp "
        "--data-parallel-size -dp --data-parallel-rank -dpn --data-parallel-start-rank -dpr "
        "--data-parallel-size-local -dpl --data-parallel-address -dpa --data-parallel-rpc-port -dpp "
        "--data-parallel-backend -dpb --[no-]data-parallel-hybrid-lb -dph --[no-]data-parallel-external-lb -dpe "
        "--data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --dp-sync-interval "
        "--[no-]disable-nccl-for-dp-synchronization --[no-]enable-expert-parallel -ep --[no-]enable-ep-weight-filter "
        "--[no-]enable-elastic-ep --elastic-ep-max-dp-size --[no-]enable-eplb --eplb-config "
        "--expert-placement-strategy --all2all-backend --[no-]enable-fault-tolerance --fault-tolerance-config",
    ),
    Group(
        Use.BREAKS,
        "Parameters with other names, shapes, types or places than the trainer's: the next weights could not be loaded.",
        "--quantization -q --quantization-config --[no-]allow-deprecated-quantization --load-format "
        "--model-loader-extra-config --hf-config-path --model-class-overrides --[no-]enable-lora --max-loras "
        "--max-lora-rank --lora-dtype --lora-modules --[no-]enable-tower-connector-lora --max-cpu-loras "
        "--[no-]fully-sharded-loras --lora-target-modules --default-mm-loras --[no-]specialize-active-lora "
        "--[no-]enable-mixed-moe-lora-format --[no-]enable-moe-shared-loras --max-lora-cls-labels --cpu-offload-gb "
        "--cpu-offload-params --offload-backend --offload-group-size --offload-num-in-group --offload-prefetch-step "
        "--offload-params",
    ),
    Group(
        Use.BREAKS,
        "Another tokenizer, task or distribution than the trainer's: completions could not be trained on.",
        "--tokenizer --[no-]skip-tokenizer-init --runner --convert --pooler-config --override-generation-config "
        "--logits-processors --watermark-config --diffusion-config -dc",
    ),
    Group(
        Use.BREAKS,
        "Another interface than the actor uses, or no server at all.",
        "--help -h --grpc --grpc-port --[no-]tokens-only --root-path --tool-server",
    ),
    Group(
        Use.MERGED,
        "Fields of the model's configuration, laid under the project's own, so that the FP32 head stays as `recipe.fp32Logits` has "
        "it; `head_dtype` is refused. The trainer does not apply them: where they change the model's outputs, the mismatch check "
        "of `weightSync.probeLimit` gives the generator no work.",
        "--hf-overrides",
    ),
    Group(
        Use.PASSED,
        "Speculative decoding, which does not change the distribution, and the settings of vLLM's plug-ins; refused together with "
        "`generator.speculation`, which sets the first and the last.",
        "--speculative-config -sc --spec-method --spec-model --spec-tokens --additional-config",
    ),
    Group(
        Use.PASSED,
        "Kernels and their precision. They change log-probabilities by rounding (a quantized cache by more), which the trainer's "
        "correction covers and `weightSync.probeLimit` bounds. `--enforce-eager` (always set on CPU) only costs speed.",
        "--[no-]enforce-eager --attention-backend --attention-config -ac --mamba-backend --mamba-ssu-algorithm "
        "--[no-]enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds --mamba-cache-dtype "
        "--mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --[no-]enable-mamba-shared-prefix-checkpoint "
        "--kv-cache-dtype --kv-cache-dtype-skip-layers --compilation-config -cc --optimization-level -O "
        "--performance-mode --kernel-config --ir-op-priority --[no-]enable-flashinfer-autotune --moe-backend "
        "--linear-backend --sparse-indexer-topk-backend --gdn-prefill-backend --kda-prefill-backend "
        "--kda-decode-backend --[no-]disable-sliding-window --[no-]disable-cascade-attn --[no-]use-fp64-gumbel "
        "--model-impl --[no-]use-replayssm --replayssm-buffer-len --[no-]swa-bounded-replay --engram-config "
        "--cudagraph-capture-sizes --max-cudagraph-capture-size --[no-]disable-custom-all-reduce --[no-]enable-hc-sp "
        "--[no-]enable-batch-sharded-sampling",
    ),
    Group(
        Use.PASSED,
        "Scheduling, caches and memory: speed, not what is sampled. `--watermark` replaces the 0.1 of "
        "`generator.adaptiveConcurrency`.",
        "--watermark --block-size --num-gpu-blocks-override --[no-]enable-prefix-caching --prefix-caching-hash-algo "
        "--prefix-cache-retention-interval --prefix-match-unit --[no-]kv-sharing-fast-prefill --kv-offloading-size "
        "--kv-offloading-backend --kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config "
        "--max-num-batched-tokens --max-num-scheduled-tokens --max-num-active-seqs --max-num-queued-reqs "
        "--max-num-queued-tokens --long-prefill-token-threshold --[no-]long-prefill-token-threshold-adaptive "
        "--scheduling-policy --[no-]enable-chunked-prefill --[no-]disable-chunked-mm-input --scheduler-cls "
        "--[no-]scheduler-reserve-full-isl --prefill-schedule-interval --[no-]disable-hybrid-kv-cache-manager "
        "--[no-]async-scheduling --stream-interval --[no-]enable-sleep-mode --[no-]sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names --[no-]enable-cumem-allocator --[no-]enable-nccl-comm-suspend "
        "--[no-]enable-dbo --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold "
        "--[no-]enable-shm-tensor-arena --[no-]numa-bind --numa-bind-nodes --numa-bind-cpus "
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds --max-parallel-loading-workers "
        "--[no-]ray-workers-use-nsight --shutdown-timeout",
    ),
    Group(
        Use.PASSED,
        "How the model's files are read. `--trust-remote-code` runs code of the model's folder in the generator.",
        "--tokenizer-mode --[no-]trust-remote-code --revision --code-revision --tokenizer-revision --config-format "
        "--hf-token --download-dir --safetensors-load-strategy --safetensors-prefetch-num-threads "
        "--safetensors-prefetch-block-size --ignore-patterns --[no-]use-tqdm-on-load --pt-load-map-location",
    ),
    Group(
        Use.PASSED,
        "Logs, metrics and traces.",
        "--[no-]enable-log-outputs --[no-]enable-log-deltas --[no-]log-error-stack --max-log-len --uvicorn-log-level "
        "--[no-]disable-uvicorn-access-log --disable-access-log-for-endpoints --[no-]enable-log-requests "
        "--logging-config --log-level --log-config-file --disable-log-stats --aggregate-engine-logging "
        "--show-hidden-metrics-for-version --otlp-traces-endpoint --collect-detailed-traces "
        "--per-request-spec-decode-metrics --[no-]kv-cache-metrics --kv-cache-metrics-sample "
        "--custom-histogram-buckets --[no-]cudagraph-metrics --[no-]enable-layerwise-nvtx-tracing "
        "--[no-]enable-mfu-metrics --[no-]enable-logging-iteration-details --jit-monitor-mode "
        "--[no-]jit-monitor-verbose --profiler-config --[no-]enable-trace-replay --[no-]fail-on-environ-validation",
    ),
    Group(
        Use.PASSED,
        "Interfaces and inputs that the actor does not use.",
        "--chat-template --chat-template-content-format --[no-]trust-request-chat-template "
        "--[no-]trust-request-mm-kwargs --default-chat-template-kwargs --response-role "
        "--[no-]return-tokens-as-token-ids --[no-]enable-auto-tool-choice "
        "--[no-]exclude-tools-when-tool-choice-none --tool-call-parser --tool-parser-plugin --tool-strict-level "
        "--[no-]enable-prompt-tokens-details --[no-]enable-per-request-metrics --[no-]enable-server-load-tracking "
        "--[no-]enable-force-include-usage --sse-keep-alive-interval --[no-]enable-tokenizer-info-endpoint "
        "--[no-]cohere-is-reasoning-model --cohere-format --anthropic-disabled-thinking-effort --fingerprint-mode "
        "--fingerprint-value --[no-]allow-credentials --allowed-origins --allowed-methods --allowed-headers "
        "--[no-]enable-request-id-headers --[no-]disable-fastapi-docs --h11-max-incomplete-event-size "
        "--h11-max-header-count --[no-]enable-offline-docs --[no-]enable-flash-late-interaction "
        "--allowed-local-media-path --allowed-media-domains "
        "--[no-]return-sampling-mask --max-logprobs --[no-]enable-prompt-embeds --served-model-name "
        "--io-processor-plugin --renderer-num-workers --reasoning-parser --reasoning-parser-plugin "
        "--reasoning-config --structured-outputs-config --aux-output-config --[no-]language-model-only "
        "--limit-mm-per-prompt --[no-]enable-mm-embeds --media-io-kwargs --mm-processor-kwargs "
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb "
        "--[no-]mm-encoder-only --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype "
        "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin "
        "--[no-]interleave-mm-strings --[no-]skip-mm-profiling --video-pruning-rate --video-pruning-method "
        "--mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb --[no-]mm-device-do-normalize",
    ),
)
"""Every option once."""


def _options(*uses: Use) -> tuple[str, ...]:
    return tuple(option for group in GROUPS if group.use in uses for option in group.options)


SET_OPTIONS: Final = _options(Use.SET)
BREAKING_OPTIONS: Final = _options(Use.BREAKS)
ALLOWED_OPTIONS: Final = (*_options(Use.MERGED, Use.PASSED), *(f"-O{level}" for level in range(4)))
"""``-O3`` is vLLM's short form of ``-O 3``."""

OVERRIDES_OPTION: Final = "--hf-overrides"
HEAD_TYPE: Final = "head_dtype"
"""The field of ``--hf-overrides`` that ``recipe.fp32Logits`` sets."""

SET_MESSAGE: Final = "is set from other fields, or by the operator itself; leave it out"
BREAKS_MESSAGE: Final = "is not supported: the weights of a run could not be updated, or its completions not be trained on; leave it out"
UNKNOWN_MESSAGE: Final = f"is not an option of vLLM {VLLM_RELEASE}: write an option in full, and a value that begins with - as --option=value"
HEAD_MESSAGE: Final = f"{HEAD_TYPE} is set from recipe.fp32Logits; leave it out"

_NEGATIVE_NUMBER = re.compile(r"-[0-9]+")


def option_name(argument: str) -> str | None:
    """The option that an argument of vLLM's command line names, as vLLM's parser normalizes it; None: it is a value.

    >>> option_name("--max_model_len=4"), option_name("--hf-overrides.a_b=1"), option_name("{}"), option_name("-1")
    ('--max-model-len', '--hf-overrides', None, None)
    """
    if not argument.startswith("-") or _NEGATIVE_NUMBER.fullmatch(argument):
        return None
    name = argument.split("=", 1)[0].split(".", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def free_option(argument: str) -> str:
    """Reject an argument of vLLM's command line that the operator sets itself, that breaks a run, or that vLLM does not have."""
    name = option_name(argument)
    if HEAD_TYPE in argument:
        raise ValueError(HEAD_MESSAGE)
    if name is None or name in ALLOWED_OPTIONS:
        return argument
    if name in SET_OPTIONS:
        raise ValueError(f"{name} {SET_MESSAGE}")
    raise ValueError(f"{name} {BREAKS_MESSAGE if name in BREAKING_OPTIONS else UNKNOWN_MESSAGE}")
