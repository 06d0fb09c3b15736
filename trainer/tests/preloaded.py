"""Imported once, by the server that test processes are forked from: what a rank imports until its first step.

DeepSpeed imports torch's compiler, networkx and more with the first engine of ZeRO 1 and above (1.5 s); ZeRO 3 collects
garbage three times an engine, which visits, and so copies, all that was forked.
"""

from __future__ import annotations

# ruff: noqa: E402, F401
import gc

gc.disable()  # the imports make a million objects that stay

import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2
import torch.distributed
import torch.profiler
import transformers.models.llama.modeling_llama

import scalerl_coordinator.main
import scalerl_trainer.main

gc.collect()
gc.freeze()
gc.enable()
