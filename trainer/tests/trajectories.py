"""Golden trajectories: five optimizer steps of a tiny model per recipe, computed by plain torch in float64.

The reference has no engine, no packing and no ranks: a sequence at a time, the library's own logits, torch's AdamW. It
shares with the trainer what turns rollouts into tensors (``rank_batch``) and the losses, which have hand-worked values
of their own in ``test_trainer_algo_golden.py``. To record it again, after an intended change of the algorithm or of the
initial weights, run this file; the diff of ``trajectories.json`` shows what moved:

    python trainer/tests/trajectories.py
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainable_places import trainable_places

from scalerl_api import wire
from scalerl_api.recipe import RecipeSpec
from scalerl_api.spec import ScratchModel
from scalerl_trainer.algo.losses import TokenBatch
from scalerl_trainer.algo.losses.make_loss import make_loss
from scalerl_trainer.engine import EngineSettings, TrainBatch
from scalerl_trainer.models import load_model, write_scratch
from scalerl_trainer.packing import Sequence
from scalerl_trainer.shard_conversion import rank_batch

GOLDEN = Path(__file__).with_name("trajectories.json")
STEPS = 5
VOCABULARY = 17
LONGEST = 24
"""Tokens of the longest prompt and completion."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "learning_rate": 5e-3,
    "warmup_steps": 2,
    "max_gradient_norm": 1.2,
    "temperature": 0.8,
    # AdamW divides by the root of the second moment plus ε. With a small ε a gradient of almost zero, which is rounding
    # noise, becomes a whole step, and no two float32 trajectories agree.
    "epsilon": 1e-4,
}

RECIPES: dict[str, dict[str, Any]] = {
    "cispo": {"loss": {"cispo": {"ratioCap": "1.2"}}},
    "ppoClip symmetric": {"loss": {"ppoClip": {"clipLow": "0.2", "clipHigh": "0.2"}}},
    "ppoClip asymmetric": {"loss": {"ppoClip": {"clipLow": "0.1", "clipHigh": "0.28"}}},
    "gspo": {"loss": {"gspo": {"clipLow": "0.03", "clipHigh": "0.04"}}},
    "reinforce": {"loss": {"reinforce": {}}},
    "dppo": {"loss": {"dppo": {"threshold": "0.01"}}},
    "truncated": {"loss": {"ppoClip": {}}, "correction": {"truncated": {"cap": "1.1"}}},
    "masked": {"loss": {"reinforce": {}}, "correction": {"masked": {"cap": "1.2"}}},
    "decoupled": {
        "loss": {"ppoClip": {"clipLow": "0.01", "clipHigh": "0.02", "dualClip": "1.03"}},
        "correction": {"truncated": {"cap": "1.1"}},
        "offPolicy": {"ppo": {"stepsPerBatch": 3}},
    },
    "bounds of a completion, and its mask": {
        "loss": {"dppo": {"threshold": "0.01", "ratioCap": "1.02"}},
        "correction": {"masked": {"cap": "1.3", "floor": "0.9", "level": "Geometric"}},
        "offPolicyMask": {"maxKl": "0.02"},
        "offPolicy": {"ppo": {"stepsPerBatch": 4}},
    },
    "gspo of a teacher, masked": {
        "loss": {"gspo": {"clipLow": "0.03", "clipHigh": "0.04"}},
        "correction": {"masked": {"cap": "1.2"}},
        "distillation": {"teacher": {"url": "http://teacher"}, "rewards": "Added"},
        "offPolicy": {"ppo": {"stepsPerBatch": 4}},
    },
    "SampleAverage": {"aggregation": "SampleAverage"},
    "TokenAverage": {"aggregation": "TokenAverage"},
    "Constant": {"aggregation": "Constant", "maxCompletionTokens": 16},
    "distilled": {"distillation": {"teacher": {"url": "http://teacher"}}},
    "distilled beside rewards": {
        "distillation": {"teacher": {"url": "http://teacher"}, "coefficient": "0.5", "rewards": "Added"},
        "correction": {"truncated": {"cap": "1.1"}},
    },
}
"""The limits are near 1, so that each of them holds for some tokens; the aggregations are with CISPO, whose own is
``PromptAverage``."""


def write_model(folder: Path) -> str:
    """A float32 model of two layers, as the other tests of the engine have it."""
    sizes = {
        "layers": 2,
        "vocabulary_size": 64,
        "hidden_size": 32,
        "attention_heads": 2,
        "intermediate_size": 48,
    }
    texts = [f"{i} + {i} = {2 * i}" for i in range(50)]
    scratch = ScratchModel.model_validate(sizes)
    write_scratch(folder, scratch, texts, seed=3, dtype="float32", context_tokens=64)
    return str(folder)


def plain_logprobs(network: Any, sequence: Sequence, temperature: float) -> torch.Tensor:
    """Log-probabilities of the completion's tokens, the sequence by itself, with the library's own logits."""
    ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
    logits = network(ids).logits[0, len(sequence.prompt) - 1 : -1] / temperature
    chosen: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(sequence.completion)[:, None])[:, 0]
    return chosen


def policies(model: str) -> list[Any]:
    """The generator's policy at each version, float64: the initial weights, moved a little further at each publish."""
    found = []
    for version in range(STEPS):
        network = load_model(model, dtype="float32").double().eval()
        for earlier in range(version):
            generator = torch.Generator().manual_seed(1000 + earlier)
            with torch.no_grad():
                for parameter in network.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(0.02 * noise)
        found.append(network)
    return found


def spans_of(random: np.random.Generator, tokens: int, step: int) -> list[wire.VersionSpan]:
    """Up to three publishes inside a completion of step ``step``, and now and then forced tokens."""
    oldest = max(0, step - 3)
    versions = range(int(random.integers(oldest, step + 1)), step + 1)
    starts = sorted(random.choice(np.arange(1, tokens), min(tokens - 1, len(versions) - 1), replace=False))
    spans = [wire.VersionSpan(v, int(s)) for v, s in zip(versions, [0, *starts], strict=False)]
    if tokens > 6 and random.random() < 0.5:
        place = int(random.integers(1, tokens - 3))
        before = [span for span in spans if span.start < place]
        after = [span for span in spans if span.start >= place + 2]
        newest = max(span.version for span in spans if span.start <= place + 2)
        spans = [*before, wire.VersionSpan(wire.MASKED, place), wire.VersionSpan(newest, place + 2), *after]
        spans = [s for i, s in enumerate(spans) if i + 1 == len(spans) or spans[i + 1].start != s.start]
    return spans


def version_of(sequence: wire.Sequence) -> list[int]:
    """The version that sampled each token, or ``wire.MASKED``."""
    tokens = len(sequence.token_ids) // 4
    ends = [*(span.start for span in sequence.versions[1:]), tokens]
    return [s.version for s, end in zip(sequence.versions, ends, strict=True) for _ in range(s.start, end)]


def fixed_shards(sampled_by: list[Any], *, one_version: bool = False) -> list[wire.Shard]:
    """The whole batch of each step: groups of different sizes and lengths.

    Group 1 has equal rewards and so no advantage; group 2 is filtered; the last completion of group 0 is forced as a whole;
    the last of group 3 has no verdict. Each token has the log-probability of its own version, or with ``one_version`` that
    of the newest: what a trainer would compute with that forgets the versions.
    """
    shards = []
    for step in range(STEPS):
        random = np.random.default_rng(step)
        groups: list[wire.GroupMeta] = []
        sequences: list[wire.Sequence] = []
        for slot, (samples, longest) in enumerate([(4, 6), (3, 16), (2, 5), (4, 12), (3, 9)]):
            lengths = random.integers(2, longest + 1, samples).tolist()
            rewards = random.choice([-1.0, 1.0, 0.3], samples).tolist()
            rewards[:2] = [1.0, -1.0]
            if slot in (1, 2):
                rewards = [1.0] * samples
            own = []
            prompt = random.integers(3, VOCABULARY, int(random.integers(1, 8)))
            for sample, tokens in enumerate(lengths):
                spans = spans_of(random, tokens, step)
                if (slot, sample) == (0, 3):
                    spans = [wire.VersionSpan(wire.MASKED, 0)]
                one = wire.Sequence(
                    group=slot,
                    sample=sample,
                    prompt_token_ids=prompt.astype("<i4").tobytes(),
                    token_ids=random.integers(3, VOCABULARY, tokens).astype("<i4").tobytes(),
                    logprobs=b"",
                    versions=spans,
                )
                newest = max(version_of(one))
                policy_of = {v: newest if one_version else v for v in range(STEPS)}
                own.append(sampled(one, sampled_by, policy_of))
            masked = [version_of(one).count(wire.MASKED) for one in own]
            ungraded = [3] if slot == 3 else []
            groups.append(
                wire.GroupMeta(
                    slot=slot,
                    scores=[float(r > 0) for r in rewards],
                    rewards=rewards,
                    completion_tokens=lengths,
                    filtered=slot == 2,
                    ungraded=ungraded,
                    masked_tokens=masked,
                )
            )
            if slot != 2:
                sequences += [one for sample, one in enumerate(own) if sample not in ungraded]
        shards.append(wire.Shard(step=step, groups=groups, sequences=sequences))
    return shards


def sampled(one: wire.Sequence, sampled_by: list[Any], policy_of: dict[int, int]) -> wire.Sequence:
    """With the log-probabilities of its tokens; ``policy_of``: by version, the index of the policy."""
    prompt, completion = (np.frombuffer(b, "<i4").tolist() for b in (one.prompt_token_ids, one.token_ids))
    versions = version_of(one)
    logprobs = np.zeros(len(completion), dtype="<f4")
    with torch.no_grad():
        for version in set(versions) - {wire.MASKED}:
            values = plain_logprobs(
                sampled_by[policy_of[version]], Sequence(prompt, completion), SETTINGS["temperature"]
            ).numpy()
            mine = np.array(versions) == version
            logprobs[mine] = values[mine]
    return wire.Sequence(
        group=one.group,
        sample=one.sample,
        prompt_token_ids=one.prompt_token_ids,
        token_ids=one.token_ids,
        logprobs=logprobs.tobytes(),
        teacher_logprobs=(1.5 * logprobs - 0.1).astype("<f4").tobytes(),
        versions=one.versions,
    )


def plain_loss(
    network: Any, batch: TrainBatch, recipe: RecipeSpec, temperature: float, proximal: Any = None
) -> torch.Tensor:
    """The loss of a whole batch at once, float64. ``proximal``: the policy of a correction; None for ``network``."""
    lengths = [len(trainable_places(sequence)) for sequence in batch.sequences]
    index_n = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))

    def logprobs_n(policy: Any) -> torch.Tensor:
        logprobs = [
            plain_logprobs(policy, sequence, temperature)[trainable_places(sequence)]
            for sequence in batch.sequences
            if len(sequence.completion)
        ]
        return torch.cat([*logprobs, torch.zeros(0, dtype=torch.float64)])

    assert batch.generator_logprobs_n is not None
    tokens = TokenBatch(
        logprobs_n(network),
        batch.generator_logprobs_n.double(),
        batch.advantages_s.double()[index_n],
        batch.weights_s.double()[index_n],
        torch.unique(index_n, return_inverse=True)[1],
        teacher_logprobs_n=None if batch.teacher_logprobs_n is None else batch.teacher_logprobs_n.double(),
        proximal_logprobs_n=None if proximal is None else logprobs_n(proximal).detach(),
    )
    return make_loss(recipe)(tokens).loss


def checksums(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """The norm of the weights' change (all parameters, flat), and its product with a fixed vector of entries in [-1, 1]:
    the norm alone would not see an exchange of two weights. Both float64."""
    moved = after.double() - before.double()
    return float(moved.norm()), float(moved @ torch.arange(len(moved), dtype=torch.float64).cos())


def flat(network: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in sorted(network.named_parameters())])


Row = tuple[float, float, float, float]
"""One step: loss, gradient norm before clipping, and the two ``checksums`` of the weights since the start."""


def plain_trajectory(model: str, recipe: RecipeSpec, shards: list[wire.Shard]) -> Iterator[Row]:
    settings = EngineSettings(**SETTINGS)
    network = load_model(model, dtype="float32").double().eval()
    before = flat(network)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=1.0,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    proximal = None
    for step, shard in enumerate(shards):
        if recipe.proximal_updates and step % recipe.proximal_updates == 0:
            proximal = copy.deepcopy(network)
        loss = plain_loss(network, rank_batch(shard, recipe).batch, recipe, settings.temperature, proximal)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_gradient_norm)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        yield (loss.item(), float(norm), *checksums(before, flat(network)))


def recipe_of(name: str) -> RecipeSpec:
    return RecipeSpec.model_validate(RECIPES[name])


def record() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        shards = fixed_shards(policies(model))
        lines = []
        for name in RECIPES:
            rows = [
                json.dumps([float(f"{value:.9g}") for value in row])
                for row in plain_trajectory(model, recipe_of(name), shards)
            ]
            lines.append(f'  "{name}": [\n    ' + ",\n    ".join(rows) + "\n  ]")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
