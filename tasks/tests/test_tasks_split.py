"""Held-out prompts are never trained on."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_tasks import GymTask, Prompt, ReasoningGymSource, SplitError, split_held_out


@dataclass
class Texts:
    """A source of given texts, which may repeat; counts how often it is read."""

    texts: list[str]
    digest: str = "d"
    reads: int = 0

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        self.reads += 1
        return Prompt(id=str(index), text=self.texts[index], answer="a")


def all_of(source):
    return [source[i] for i in range(len(source))]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_split_shares_no_text(data):
    texts = data.draw(st.lists(st.integers(0, 12).map(str), min_size=2, max_size=40))
    different = len(set(texts))
    size = data.draw(st.integers(1, len(texts) - 1))
    seed = data.draw(st.integers(0, 2**40))
    if size > different or size == different:
        with pytest.raises(SplitError):
            split_held_out(Texts(texts), size, seed)
        return
    train, held_out = split_held_out(Texts(texts), size, seed)
    trained, evaluated = all_of(train), all_of(held_out)
    assert len(evaluated) == len({p.text for p in evaluated}) == size
    assert len(trained) == len(texts) - size
    assert {p.text for p in trained}.isdisjoint(p.text for p in evaluated)
    # Every text that is not held out is trained on.
    assert {p.text for p in trained} | {p.text for p in evaluated} == set(texts)
    # Nothing moves without need: a prompt with a text of its own keeps its place in the order.
    kept = [p.id for p in trained if texts.count(p.text) == 1 and [q.id for q in trained].count(p.id) == 1]
    assert kept == sorted(kept, key=int)
    # And all of it is the same the second time.
    again = split_held_out(Texts(texts), size, seed)
    assert (all_of(again[0]), all_of(again[1])) == (trained, evaluated)
    assert (again[0].digest, again[1].digest) == (train.digest, held_out.digest)


def test_split_of_repeating_prompts():
    """One-digit additions: 100 texts at most, thousands of times each."""
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = split_held_out(
        ReasoningGymSource(GymTask("chain_sum", parameters, seed=5, size=5000)), 50, seed=1
    )
    evaluated = {p.text for p in all_of(held_out)}
    assert len(evaluated) == 50
    trained = all_of(train)
    assert len(trained) == 4950
    assert evaluated.isdisjoint(p.text for p in trained)


def test_split_reads_little_of_large_source():
    source = ReasoningGymSource(
        GymTask("chain_sum", {"min_digits": 6, "max_digits": 6}, seed=1, size=100_000_000)
    )
    train, held_out = split_held_out(source, 1000, seed=0)
    assert (len(train), len(held_out)) == (99_999_000, 1000)
    assert train[99_998_999].text
    counted = Texts([str(i) for i in range(10_000)])
    split_held_out(counted, 100, seed=0)
    assert counted.reads <= 101 + 64


GOLDEN_TEXTS = ["229", "299", "178", "750", "425", "263", "942", "947"]
GOLDEN_DIGEST = "2a6ac170901776c07af0c0114f4291480bafe44c6f4c6e1064d931e1fa0d4c0f"


def test_golden_split():
    """An evaluation set must not change with the code: its curve would change with it."""
    _, held_out = split_held_out(Texts([str(i) for i in range(1000)]), 8, seed=7)
    assert [p.text for p in all_of(held_out)] == GOLDEN_TEXTS
    assert held_out.digest == GOLDEN_DIGEST


def test_split_depends_on_seed_size_and_source():
    texts = [str(i) for i in range(1000)]
    first = split_held_out(Texts(texts), 50, 1)
    for other in (split_held_out(Texts(texts), 50, 2), split_held_out(Texts(texts, "e"), 50, 1)):
        assert other[1].digest != first[1].digest
        assert other[0].digest != first[0].digest
        assert [p.text for p in all_of(other[1])] != [p.text for p in all_of(first[1])]
    larger = split_held_out(Texts(texts), 60, 1)[1]
    assert larger.digest != first[1].digest
    assert [p.text for p in all_of(larger)][:50] == [p.text for p in all_of(first[1])]
    assert first[0].digest != first[1].digest


@pytest.mark.parametrize(
    ("texts", "size", "says"),
    [
        (["a", "b"], 0, "at least one prompt"),
        (["a", "b"], 2, "lower task.heldOut.size"),
        (["a", "b"], 9, "the source has 2"),
        (["a"] * 9, 2, "only 1 different"),
        (["a", "b"] * 9, 2, "too few different"),
    ],
)
def test_split_refuses_small_source(texts, size, says):
    with pytest.raises(SplitError, match=says):
        split_held_out(Texts(texts), size, 0)


@pytest.mark.parametrize("index", [-1, 900])
def test_an_index_out_of_range(index):
    train, held_out = split_held_out(Texts([str(i) for i in range(1000)]), 100, 0)
    with pytest.raises(IndexError):
        _ = train[index]
    with pytest.raises(IndexError):
        _ = held_out[index]
