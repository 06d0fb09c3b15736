"""Prompts from reasoning-gym."""

import threading
import tracemalloc

import pytest

from scalerl_api.load import parse_run
from scalerl_tasks import (
    GymTask,
    ParameterError,
    ReasoningGymSource,
    SourceError,
    UnknownTaskError,
    open_task,
    verifier_config,
)

ADDITION = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 3,
    "max_digits": 3,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


GOLDEN = [
    ("Calculate 41 + 265.", "306"),
    ("Calculate 261 + 120.", "381"),
    ("Calculate 86 + 369.", "455"),
]


def test_golden_prompts():
    """What seed 0 gives; when a release of reasoning-gym changes it, runs and curves change with it."""
    source = ReasoningGymSource(GymTask("basic_arithmetic", ADDITION, seed=0, size=100))
    assert [(source[i].text, source[i].answer) for i in range(3)] == GOLDEN
    assert source[0].difficulty == 1.0
    assert source[0].id == f"basic_arithmetic/{source.digest[:12]}/0"
    assert len(source) == 100


def test_gym_digest_differs_between_sets():
    def digest(parameters=ADDITION, **rest):
        return ReasoningGymSource(GymTask("basic_arithmetic", parameters, **rest)).digest

    same = digest(seed=1, size=50)
    assert digest(seed=1, size=50) == same
    # A default written out is the same set.
    assert digest(ADDITION | {"format_style": "simple"}, seed=1, size=50) == same
    others = {
        digest(seed=2, size=50),
        digest(seed=1, size=51),
        digest(ADDITION | {"max_terms": 3}, seed=1, size=50),
    }
    assert len(others | {same}) == 4


def test_gym_source_is_deterministic_by_index():
    source = ReasoningGymSource(GymTask("gsm_symbolic", seed=3, size=40))
    wanted = [source[i] for i in range(40)]
    seen = {}

    def read(start):
        for i in range(40):
            at = (i * 7 + start) % 40
            seen[start, at] = source[at]

    threads = [threading.Thread(target=read, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert len(seen) == 160
    assert all(prompt == wanted[at] for (_, at), prompt in seen.items())


@pytest.mark.parametrize("index", [-1, 5, 10**9])
def test_an_index_out_of_range(index):
    with pytest.raises(IndexError, match=r"outside 0\.\.4"):
        _ = ReasoningGymSource(GymTask("chain_sum", size=5))[index]


def test_gym_source_memory_is_constant():
    tracemalloc.start()
    try:
        source = ReasoningGymSource(GymTask("chain_sum", seed=1, size=100_000_000))
        before, _ = tracemalloc.get_traced_memory()
        for i in range(0, 100_000_000, 50_000):
            _ = source[i]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000


@pytest.mark.parametrize(
    ("parameters", "named", "says"),
    [
        ({"min_term": 2}, "min_term", ["'min_term'", "did you mean 'min_terms'", "allowed:", "max_digits"]),
        ({"min_terms": "two"}, "min_terms", ["'min_terms'", "'two'"]),
        ({"min_terms": 2.5}, "min_terms", ["'min_terms'", "2.5"]),
        ({"min_terms": True}, "min_terms", ["'min_terms'", "bool"]),
        ({"min_terms": [2]}, "min_terms", ["'min_terms'", "array"]),
        ({"min_terms": 0}, "min_terms", ["'min_terms'", "must be positive", "min_terms=0"]),
        ({"max_terms": 2, "min_terms": 3}, "max_terms", ["max_terms", ">= min_terms"]),
        ({"seed": 3}, "seed", ["'seed'", "beside the parameters"]),
        ({"size": 3}, "size", ["'size'", "beside the parameters"]),
    ],
)
def test_gym_task_names_bad_parameter(parameters, named, says):
    with pytest.raises(ParameterError) as caught:
        ReasoningGymSource(GymTask("chain_sum", parameters))
    assert caught.value.parameter == named
    for text in ["'chain_sum'", *says]:
        assert text in str(caught.value)


def test_gym_task_reports_own_validation():
    with pytest.raises(ParameterError, match=r"unsupported operator: \? \(parameters given: operators="):
        ReasoningGymSource(GymTask("basic_arithmetic", {"operators": ["?"]}))


def test_gym_task_refuses_size_0():
    with pytest.raises(ParameterError, match="size is 0"):
        ReasoningGymSource(GymTask("chain_sum", size=0))


def test_gym_task_converts_text_parameters():
    """Floats are not allowed in a run's YAML."""
    config = GymTask("basic_arithmetic", ADDITION | {"min_terms": "2"}).create().config
    assert config.min_terms == 2
    assert GymTask("gsm_symbolic", {"difficulty": "1.0"}).create().config.difficulty == 1.0
    weights = GymTask("aiw", {"task_type_weights": ["0.5", "0.25", "2.5e-1"]}).create().config
    assert weights.task_type_weights == [0.5, 0.25, 0.25]


def test_gym_task_gets_fraction_of_run_file():
    text = """
        metadata: {name: a}
        spec:
          model: {scratch: {}, contextTokens: 64}
          task:
            reasoningGym: {name: aiw, parameters: {task_type_weights: ["0.5", "0.25", "0.25"], max_entities: 7}, size: 20}
            verifier: {name: reasoning-gym}
            heldOut: {size: 2}
          recipe: {maxCompletionTokens: 16}
          budget: {maxSteps: 3}
    """
    task = parse_run(text, "run.yaml").spec.task
    assert open_task(task).train[0].text
    assert verifier_config(task).task.create().config.task_type_weights == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chain_sums", "did you mean 'chain_sum'"),
        ("zzzz", "it has ab, "),
        ("composite", "no task 'composite'"),
    ],
)
def test_gym_task_refuses_unknown_name(name, says):
    with pytest.raises(UnknownTaskError, match=says):
        ReasoningGymSource(GymTask(name))


@pytest.mark.slow
def test_gym_source_refuses_task_that_ignores_seed():
    with pytest.raises(SourceError, match="different prompt at each read"):
        ReasoningGymSource(GymTask("list_functions"))


def test_gym_task_reports_missing_pycosat():
    """The locks leave pycosat out; all the other tasks of its category work without it."""
    assert ReasoningGymSource(GymTask("propositional_logic", {}, seed=0, size=10))[0].text
    with pytest.raises(SourceError, match=r"zebra_puzzles.*pycosat.*pip install"):
        ReasoningGymSource(GymTask("zebra_puzzles", {}, seed=0, size=10))[0]
