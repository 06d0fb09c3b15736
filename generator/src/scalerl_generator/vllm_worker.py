"""What vLLM's processes load of this package: the plug-in, and the methods that its workers have besides vLLM's.

vLLM calls :func:`register` in every process of the server, through its ``vllm.general_plugins`` entry point.
"""

from __future__ import annotations

import base64
import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from scalerl_api.wire import WeightReceive
from scalerl_generator.drafts.draft_protocol import DraftTally, PastResponses
from scalerl_generator.server import vllm_failures
from scalerl_generator.server.sampling_seed import seed_generators
from scalerl_generator.server.server_options import PLUGIN
from scalerl_generator.server.start_environment import RUNTIME_LORA
from scalerl_generator.server.vllm_cpu_sampler import patch_cpu_sampler
from scalerl_generator.server.vllm_lifetime import kill_spawned_with_parent

if TYPE_CHECKING:
    from scalerl_generator.drafts.vllm_proposer import HistoryProposer
    from scalerl_generator.weights.vllm_weight_engine import ScaleRLWeightEngine

_ENGINE = "scalerl_generator.weights.vllm_weight_engine"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; vLLM may call it more than once."""
    kill_spawned_with_parent()
    vllm_failures.watch()
    patch_cpu_sampler()
    if RUNTIME_LORA in os.environ:
        from scalerl_generator.weights.vllm_lora_versions import leave_out_embeddings

        leave_out_embeddings()
    # Silence vLLM's dump of a failed step: it has the whole configuration and every token of every request.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    if PLUGIN not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(PLUGIN, _ENGINE, "ScaleRLWeightEngine")


class WorkerExtension:
    """Mix-in of vLLM's worker class (``--worker-extension-cls``), called through ``/collective_rpc`` with string arguments."""

    weight_transfer_engine: ScaleRLWeightEngine
    model_runner: Any
    _weight_update_active: bool

    def scalerl_publish_report(self) -> dict[str, Any]:
        """:class:`~.update_reports.PublishReport` of the last update, as a dict."""
        report = self.weight_transfer_engine.report
        report.active = self._weight_update_active
        encoded: dict[str, Any] = msgspec.to_builtins(report)
        return encoded

    def scalerl_join_problem(self, epoch: str) -> str | None:
        """Why the worker is not in the group of ``epoch``; empty if it is, None while the group opens."""
        return self.weight_transfer_engine.join_problem(int(epoch))

    def scalerl_fetch(self, encoded: str) -> None:
        """Start to read a version from files; ``encoded`` is base64 of :class:`scalerl_api.wire.WeightReceive`."""
        self.weight_transfer_engine.fetch(
            msgspec.msgpack.decode(base64.b64decode(encoded), type=WeightReceive)
        )

    def scalerl_fetched(self, version: str) -> dict[str, Any]:
        """:class:`~.update_reports.FetchReport` of ``version``, as a dict."""
        report: dict[str, Any] = msgspec.to_builtins(self.weight_transfer_engine.fetched(int(version)))
        return report

    def scalerl_seed(self, seed: str) -> None:
        """Seed this worker's random numbers for this start; ``seed`` is in hex. Equal for all tensor-parallel workers."""
        seed_generators(bytes.fromhex(seed))

    def scalerl_attach_proposer(self) -> None:
        """Give the proposer of drafts the model runner, which knows the ids of requests."""
        self._proposer.attach(self.model_runner, get_tensor_model_parallel_rank())

    def scalerl_remember(self, encoded: str) -> None:
        """Add past responses to the drafter's memory; ``encoded`` is base64 of :class:`~.draft_protocol.PastResponses`."""
        past = msgspec.msgpack.decode(base64.b64decode(encoded), type=PastResponses)
        self._proposer.remember(past)

    def scalerl_take_draft_tally(self, prompt_key: str) -> DraftTally:
        """Drafted and accepted tokens of a prompt's requests since the last call."""
        return self._proposer.take_tally(prompt_key)

    def scalerl_draft_report(self) -> dict[str, Any]:
        """:class:`~.draft_protocol.DraftReport` since the server's start, as a dict."""
        return asdict(self._proposer.report)

    @property
    def _proposer(self) -> HistoryProposer:
        proposer: HistoryProposer = self.model_runner.drafter
        return proposer
