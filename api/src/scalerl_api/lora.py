"""``spec.trainer.lora``: low-rank adapters, what their modes imply, and the rules of these."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from scalerl_api.fields import Matches, Model, Rule

ModuleName = Annotated[
    str,
    Field(max_length=256),
    AfterValidator(
        Matches(
            r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$",
            "must be a layer's name like q_proj, or the end of one like mlp.up_proj",
        )
    ),
]


LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those of vLLM's ``--max-lora-rank``: its memory for adapters is of the next one."""


class LoraSpec(Model):
    """Low-rank adapters (LoRA): the trainer updates them alone, and generators sample with weights that have them merged."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rank of the change of a layer's weight."""
    alpha: Annotated[int, Field(ge=1, le=65536)] = 32
    """The change is scaled by ``alpha / rank``."""
    target_modules: Annotated[list[ModuleName], Field(max_length=64)] = []
    """Names of the linear layers that get adapters, like ``q_proj``; default: all but the output embedding."""
    publish: Literal["Merged", "Adapter"] = "Merged"
    """What is sent to generators: the weights with merged adapters, or the adapters alone, which each generator merges with the
    weights in its model's files. That is 1 to 2 % of the bytes, and a read of the model for each version."""
    in_flight: Literal["Continue", "FinishOnOwn"] = "Continue"
    """Completions in flight at an update continue with the new version, or finish on their own, for which vLLM keeps several."""
    export: Literal["Merged", "Adapter"] = "Merged"
    """What exports contain: the model with merged adapters, or the adapters in the format of peft."""

    rules = (
        Rule(
            "!has(self.inFlight) || self.inFlight != 'FinishOnOwn' || has(self.publish) && self.publish == 'Adapter' "
            "&& (!has(self.rank) || self.rank <= 512)",
            "FinishOnOwn needs publish: Adapter, of which vLLM can hold several versions, and a rank of at most 512",
            "inFlight",
            lambda lora: (
                not lora.finishes_on_own or (lora.publishes_adapters and lora.rank <= LORA_RANKS[-1])
            ),
        ),
    )

    @property
    def publishes_adapters(self) -> bool:
        """Whether generators get adapters, and not weights."""
        return self.publish == "Adapter"

    @property
    def exports_adapters(self) -> bool:
        return self.export == "Adapter"

    @property
    def finishes_on_own(self) -> bool:
        """Whether completions in flight finish on their own version, so that vLLM has several as adapters of its own."""
        return self.in_flight == "FinishOnOwn"


def reserved_rank(rank: int) -> int:
    """The rank that vLLM reserves memory for, where it has versions of adapters of this rank."""
    return next(one for one in LORA_RANKS if one >= rank)


LORA_RULES: Final = (
    Rule(
        "!has(self.generator.speculation) || !has(self.trainer.lora) || !has(self.trainer.lora.inFlight) || "
        "self.trainer.lora.inFlight == 'Continue'",
        "trainer.lora.inFlight FinishOnOwn cannot go with generator.speculation: leave one of them out",
        "trainer.lora.inFlight",
        lambda spec: (
            spec.generator.speculation is None
            or spec.trainer.lora is None
            or not spec.trainer.lora.finishes_on_own
        ),
    ),
)
"""Rules of a run's spec."""
