"""The trainer's policy with random weights, for ``gpu_check`` beside a generator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from scalerl_trainer.models import varlen
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.models.precision import cast_parameters
from scalerl_trainer.models.scratch import train_tokenizer
from support.gpu_device import Options, open_device
from support.gpu_models import SHAPES, Shape, make, policy_logprobs

LOGIT_SPREAD = 3.0
"""Standard deviation of a token's logits, in nats."""


class Trainer:
    """The policy, and its weights as the trainer writes them."""

    def __init__(self, options: Options) -> None:
        self.device = open_device(options)
        self.shape = dataclasses.replace(SHAPES["0.5B"], rows=8)
        if options.tiny:
            self.shape = Shape("qwen2", 128, 2, 4, 2, 256, 512, 256, 4)
        model = make(self.shape, self.device, torch.float32)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(
                LOGIT_SPREAD / self.shape.hidden**0.5 / self.shape.spread
            )
            for vector in (p for p in model.parameters() if p.dim() == 1):  # biases are 0 and norms 1
                vector.add_(torch.randn_like(vector), alpha=0.1).mul_(torch.randn_like(vector).sign())
        cast_parameters(model, torch.bfloat16)
        self.policy = Policy(model, fp32_head=True).eval()
        self.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def save(self, folder: Path) -> None:
        """The model with a tokenizer that nothing uses. Then its attention becomes that of the trainer on such a device."""
        model = self.policy.causal_lm
        model.save_pretrained(folder)
        if varlen.problem(model, torch.bfloat16, self.device) is None:
            varlen.use(model.config)
        train_tokenizer(["0 1 2 3"], 512).save(str(folder / "tokenizer.json"))
        special = {"eos_token": "<eos>", "pad_token": "<pad>"}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def negate(self, which: int, share: float) -> None:
        generator = torch.Generator(self.device).manual_seed(round(1000 * share))
        for tensor in list(self.weights.values())[which::2]:
            drawn = torch.rand(tensor.shape, generator=generator, device=self.device)
            tensor.mul_(torch.where(drawn < share, -1.0, 1.0))

    def adapters(self) -> dict[str, torch.Tensor]:
        """Adapters of rank 8 for two kinds of layers, by their names in a publish."""
        found = {}
        for name, weight in self.weights.items():
            if name.endswith(("q_proj.weight", "down_proj.weight")):
                found[f"{name}/lora_A"] = torch.randn(8, weight.shape[1], device=self.device) * 0.02
                found[f"{name}/lora_B"] = torch.randn(weight.shape[0], 8, device=self.device) * 0.1
        return found

    def merge(self, adapters: dict[str, torch.Tensor], scale: float) -> None:
        for name, weight in self.weights.items():
            if f"{name}/lora_A" in adapters:
                change = adapters[f"{name}/lora_B"] @ adapters[f"{name}/lora_A"]
                weight.copy_(weight.float().add(change, alpha=scale))

    def prompts(self, count: int, length: int = 64) -> list[list[int]]:
        return torch.randint(3, self.shape.vocabulary, (count, length)).tolist()

    def score(self, sequences: list[list[int]], start: int = 1) -> torch.Tensor:
        """Log-probabilities of all tokens from position ``start`` on."""
        found = [policy_logprobs(self.policy, ids, self.device)[start - 1 :] for ids in sequences]
        return torch.cat(found).cpu()
