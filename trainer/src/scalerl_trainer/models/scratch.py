"""A small Llama that knows nothing, with a tokenizer trained on the task's own text: for tests and teaching.

The folder it writes is what any hub model's folder is: ``config.json``, ``model.safetensors``, ``tokenizer.json``,
``tokenizer_config.json``, ``generation_config.json``. Trainer and inference server read it the same way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl_trainer.errors import TokenizerError
from scalerl_trainer.models.memory import Dtype

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# All bytes and the two special tokens: with as many words every text can be spelled.
FULL_ALPHABET = 258
# Llama's 0.02 is made for widths of thousands; a narrow model gets half of 1/sqrt(width), up to here. The ground is thin:
# one seed at width 128, where 0.06 stood at a loss of .89 and 0.02 at 1.14 after 300 equal steps.
INITIAL_STD_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class ScratchSettings:
    """Sizes as in a Llama configuration. ``vocabulary_size`` is an upper bound: the tokenizer may need less."""

    layers: int = 4
    hidden_size: int = 128
    attention_heads: int = 4
    intermediate_size: int = 384
    vocabulary_size: int = 512
    context_tokens: int = 512
    tied_embeddings: bool = True


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Any:
    """A byte-level BPE tokenizer of at most ``vocabulary_size`` words in which every digit is a token of its own.

    Digits stand alone because arithmetic over merged digits is needlessly hard to learn. With 258 words or more every
    text can be spelled. With fewer, the alphabet is the bytes that occur in ``texts`` and the ten digits, and any other
    byte becomes ``<unk>``. Deterministic. Raises ``TokenizerError`` when the alphabet alone is larger.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = list(texts)
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = [PAD, EOS]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary_size < FULL_ALPHABET:
        special.append(UNKNOWN)
        alphabet = set("0123456789").union(
            *(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
        )
    if len(special) + len(alphabet) > vocabulary_size:
        raise TokenizerError(
            f"the task's text uses {len(alphabet)} different bytes: a vocabulary of {vocabulary_size} is too small, "
            f"take at least {len(special) + len(alphabet)}"
        )
    unknown = UNKNOWN if UNKNOWN in special else None
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=unknown
    )


def make_scratch(
    directory: Path, settings: ScratchSettings, texts: Iterable[str], *, seed: int, dtype: Dtype = "float32"
) -> None:
    """Write model and tokenizer to ``directory``, all or nothing; the same arguments give the same bytes.

    Raises ``FileExistsError`` when ``directory`` exists: a model is never overwritten.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if directory.exists():
        raise FileExistsError(
            f"{directory} exists: remove it, or choose another folder for the scratch model"
        )
    tokenizer = train_tokenizer(texts, settings.vocabulary_size)
    tokenizer.model_max_length = settings.context_tokens
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.attention_heads,
        num_key_value_heads=settings.attention_heads,
        max_position_embeddings=settings.context_tokens,
        tie_word_embeddings=settings.tied_embeddings,
        initializer_range=min(INITIAL_STD_LIMIT, 0.5 * settings.hidden_size**-0.5),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The global generator is put back: making a model is not allowed to move anyone's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)
        os.rename(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
