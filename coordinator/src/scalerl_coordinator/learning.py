"""Why a run that completes its steps learns nothing: for its status, as sentences that stay the same while a problem lasts."""

from __future__ import annotations

from msgspec import structs

from scalerl_api.wire import Sample
from scalerl_coordinator.core import Core

FLAT_STEPS = 3
"""Consecutive steps without anything to learn after which the status has a problem. Of ScaleRL's 768 completions, one right in a
thousand is missed three times by one run in ten; smaller batches of hard prompts may have such steps for a while."""
_UNUSABLE_FRACTION = 0.001
"""Part of the recent tokens without a finite log-probability from which on the status has a problem."""
_MAX_TEXT = 400


def bounded(sample: Sample) -> Sample:
    """The sample with texts of at most 400 characters, whatever its sender."""
    names = ("prompt_id", "reply", "answer", "reference")
    return structs.replace(sample, **{name: getattr(sample, name)[:_MAX_TEXT] for name in names})


def learning_problem(core: Core) -> str:
    """Why the last steps taught the policy nothing; empty if they did, or if it learns from a teacher."""
    state, lineage = core.state, core.state.lineage
    steps = lineage.flat_steps
    # The steps of a run that ends earlier are all that it has.
    is_long = steps >= FLAT_STEPS or (0 < steps == state.version and bool(core.end_reason))
    if not is_long or core.settings.teacher:
        return ""
    last = f"the last {FLAT_STEPS} steps or more" if steps >= FLAT_STEPS else "all steps of the run"
    if lineage.flat_high <= 0:
        text = (
            f"no completion of {last} scored above 0, so nothing is learned: check that the verifier accepts the form in which "
            "the prompt asks for the answer, and the reference answers; or take easier prompts"
        )
    elif lineage.flat_low >= 1:
        text = (
            f"every completion of {last} scored 1, so nothing is learned: take harder prompts, or end the run"
        )
    else:
        text = (
            f"in {last}, the completions of each prompt had equal rewards, so nothing is learned: take prompts that the policy "
            "solves sometimes, or more completions per prompt"
        )
    return text if state.sample is None else f"{text}. For example, {describe(state.sample)}"


def describe(sample: Sample) -> str:
    """The sample in one line. A reply is hostile: what a terminal could interpret is escaped.

    >>> describe(Sample(prompt_id="p", reply="It is\\n\\x1b[31m5.", answer="5.", reference="5", score=0.0))
    "prompt 'p': reply 'It is\\\\n\\\\x1b[31m5.', extracted answer '5.', reference answer '5', score 0"
    """
    return (
        f"prompt {sample.prompt_id!r}: reply {sample.reply!r}, extracted answer {sample.answer!r}, reference answer "
        f"{sample.reference!r}, score {sample.score:g}"
    )


def logprob_problem(core: Core) -> str:
    """That some of the recent tokens have no finite log-probability; empty if nearly all have."""
    lineage = core.state.lineage
    if lineage.recent_unusable_tokens <= _UNUSABLE_FRACTION * lineage.recent_tokens:
        return ""
    return (
        "generators gave log-probabilities that are not finite numbers, and these tokens are not trained on "
        "(unusable_tokens in metrics.jsonl counts them): the model's weights may have values that are not numbers, or its "
        "logits exceed the range of model.dtype"
    )
