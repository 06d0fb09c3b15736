"""The proposer of drafts with the batches of a model runner: sequences that come, leave, return and end."""

from types import SimpleNamespace

import numpy as np
import pytest

from scalerl_generator.drafts.draft_protocol import MEMORY_TOKENS, PastResponses, request_id
from scalerl_generator.drafts.vllm_proposer import HistoryProposer
from scalerl_generator.drafts.vllm_rejection_sampler import LOGITS_BYTES

pytestmark = pytest.mark.timeout(300)  # the first test compiles

KEY, PROMPT = "4e842f2f50cc089e", [5, 6, 7]
CONTEXT, SEQUENCES, STEP_TOKENS, STOP = 128, 4, 40, 1


class Runner:
    """vLLM's model runner, as far as a proposer sees it."""

    def __init__(self, rank: int = 0, max_draft: int = 8, vocabulary: int = 100) -> None:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=STEP_TOKENS),
            speculative_config=SimpleNamespace(num_speculative_tokens=max_draft),
            model_config=SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: vocabulary),
            additional_config={MEMORY_TOKENS: 10_000},
        )
        self.rows: dict[str, list[int]] = {}
        self.max_tokens = CONTEXT
        self.requests: dict[str, SimpleNamespace] = {}
        self.input_batch = SimpleNamespace(req_ids=[], req_id_to_index={}, num_prompt_tokens=[])
        self.effective_drafter_max_model_len = 0
        self.proposer = HistoryProposer(config)
        self.proposer.attach(self, rank)

    def step(self, **sampled: list[int]) -> dict[str, list[int]]:
        """One step of these requests, by row; the drafts of each."""
        names = list(sampled)
        for name, tokens in sampled.items():
            self.rows.setdefault(name, list(PROMPT)).extend(tokens)
        ids = [IDS.get(name, name) for name in names]
        params = SimpleNamespace(max_tokens=self.max_tokens, all_stop_token_ids={STOP})
        self.requests = dict.fromkeys(ids, SimpleNamespace(sampling_params=params))
        self.input_batch.req_ids = ids
        self.input_batch.req_id_to_index = {one: at for at, one in enumerate(ids)}
        self.input_batch.num_prompt_tokens = [len(PROMPT)] * len(ids)
        tokens_cpu = np.zeros((SEQUENCES, CONTEXT), np.int32)
        for at, name in enumerate(names):
            tokens_cpu[at, : len(self.rows[name])] = self.rows[name]
        lengths = np.array([len(self.rows[name]) for name in names], np.int32)
        drafts = self.proposer.propose(list(sampled.values()), lengths, tokens_cpu)
        return dict(zip(names, drafts, strict=True))


IDS = {name: request_id(KEY) for name in ("a", "b", "c")}
RESPONSE = list(range(10, 60))


def remembering(**options: int) -> Runner:
    runner = Runner(**options)
    runner.proposer.remember(past(RESPONSE))
    return runner


def past(response: list[int]) -> PastResponses:
    prompt, tokens = (np.array(one, "<i4").tobytes() for one in (PROMPT, response))
    return PastResponses(KEY, prompt, [tokens])


def test_proposer_drafts_what_was_remembered_and_counts_it() -> None:
    runner = remembering()
    assert runner.step(a=[10], b=[10]) == {"a": RESPONSE[1:9], "b": RESPONSE[1:9]}
    runner.step(a=[11, 12, 77], b=[99])
    assert runner.proposer.take_tally(KEY) == ([2] * 8, [1, 1] + [0] * 6)
    assert runner.proposer.take_tally(KEY) == ([0] * 8, [0] * 8)
    report = runner.proposer.report
    assert (report.drafted_tokens, report.accepted_tokens, report.remembered_responses) == (16, 2, 1)


def test_proposer_drafts_what_the_memory_of_a_step_can_verify() -> None:
    runner = remembering(vocabulary=LOGITS_BYTES // (4 * 3 * 6))
    assert runner.step(a=[10], b=[10]) == {"a": RESPONSE[1:4], "b": RESPONSE[1:4]}
    assert runner.step(a=[11]) == {"a": RESPONSE[2:8]}


def test_proposer_drafts_nothing_for_requests_that_name_no_prompt() -> None:
    runner = remembering()
    assert runner.step(evaluation=[10], a=[10])["evaluation"] == []


def test_proposer_drafts_nothing_on_further_ranks() -> None:
    runner = remembering(rank=1)
    assert runner.step(a=[10]) == {"a": []}
    assert runner.proposer.take_tally(KEY) == ([0] * 8, [0] * 8)


def test_proposer_frees_sequences_that_leave_and_takes_them_back() -> None:
    """More requests than sequences over time, preempted ones among them: no more than the batch are in memory at once."""
    runner = remembering()
    for round_ in range(10):
        names = ("a", "b", "c") if round_ % 2 else ("c", "a")
        drafts = runner.step(**{name: [RESPONSE[round_]] for name in names})
        assert all(len(draft) <= 8 for draft in drafts.values())
    runner.step(b=[1])
    drafted, accepted = runner.proposer.take_tally(KEY)
    assert all(at_most >= here for at_most, here in zip(drafted, accepted, strict=True))
    assert sum(accepted) > 0


def test_proposer_ignores_tokens_after_a_stop_token() -> None:
    """vLLM discards them after the step, so they are not accepted."""
    runner = remembering()
    runner.proposer.remember(past([70, STOP, 71, 72]))
    assert runner.step(a=[70]) == {"a": [STOP]}
    assert runner.step(a=[STOP, 71]) == {"a": []}
    assert runner.proposer.take_tally(KEY) == ([1, *[0] * 7], [1, *[0] * 7])


def test_message_of_an_environment_is_no_draft_but_context() -> None:
    """Of a past episode with a message after its first reply."""
    runner, message = Runner(), list(range(80, 90))
    runner.proposer.remember(past([70, 71, STOP, *message, 90, 91, 92, STOP]))
    assert runner.step(a=[70]) == {"a": [71, STOP]}
    runner.rows["b"] = [*PROMPT, 70, 71, STOP, *message]
    assert runner.step(b=[90]) == {"b": [91, 92, STOP]}


def test_proposer_does_not_remember_tokens_after_a_stop_token() -> None:
    for stop, drafted in ((STOP, []), (2, [43])):
        runner = Runner()
        runner.step(a=[40, stop, 41, 42, 43])
        assert runner.step(b=[41, 42]) == {"b": drafted}


def test_proposer_drafts_no_more_than_the_request_asks_for() -> None:
    runner = remembering()
    runner.max_tokens = 6
    assert runner.step(a=[10]) == {"a": RESPONSE[1:5]}
    assert runner.step(a=RESPONSE[1:6]) == {"a": []}


def test_proposer_stays_within_the_context() -> None:
    runner = remembering()
    runner.rows["a"] = [*PROMPT, *[3] * (CONTEXT - len(PROMPT) - 4)]
    runner.rows["a"][-8:] = RESPONSE[:8]
    assert len(runner.step(a=[RESPONSE[8]])["a"]) == 2
    assert runner.effective_drafter_max_model_len > CONTEXT


def test_proposer_leaves_room_for_every_sequence_in_a_step() -> None:
    """Four rows in 40 tokens: a token and nine drafted ones each."""
    runner = remembering(max_draft=32)
    drafts = runner.step(a=[10], b=[10], c=[10], other=[10])
    assert [len(draft) for draft in drafts.values()] == [9, 9, 9, 0]


def test_proposer_drafts_nothing_while_a_prompt_is_read() -> None:
    runner = remembering()
    assert runner.step(a=[], b=[10]) == {"a": [], "b": RESPONSE[1:9]}
