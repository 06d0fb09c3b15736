"""``scalerl simulate``: what is conserved, runs that can be computed by hand, and traces that are none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api import trace
from scalerl_cli.exits import BAD_INPUT, DONE
from scalerl_cli.main import main
from scalerl_coordinator.scheduling import (
    ByLength,
    Generator,
    LeastLoaded,
    OpenSlot,
    SchedulerInput,
    SchedulingPolicy,
)
from scalerl_coordinator.slots import OffPolicy
from scalerl_extras.simulation.baselines import HistoPipe, RoundRobin, SlotOrder, april, tail_batching
from scalerl_extras.simulation.simulator import simulate
from scalerl_extras.simulation.speeds import fit_decode, fit_trainer, publish_seconds
from scalerl_extras.simulation.trace_file import read_trace
from scalerl_extras.simulation.workload import (
    Cluster,
    DecodeSpeed,
    Drafts,
    Group,
    Workload,
    from_history,
    known,
    lower_bound,
)
from scalerl_generator.drafts.draft_threshold import DraftThreshold

SLOW = Cluster(2, 3, DecodeSpeed(1.0, 0.25), 5.0, 0.01, 2.0)
POLICIES = (SlotOrder(), RoundRobin(), LeastLoaded(), ByLength(), HistoPipe())


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    size, steps, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    lengths = st.tuples(*[st.integers(1, 60)] * per_group)
    drafts = st.sampled_from([Drafts(), Drafts(0.5), Drafts(0.9), Drafts(0.7, 4.5)])
    groups = [
        Group((0, draw(st.integers(0, 5))), draw(lengths, label="lengths"), draw(drafts))
        for _ in range(size * steps)
    ]
    return Workload(groups, size)


@given(
    work=workloads(),
    policy=st.sampled_from(POLICIES),
    scheme=st.sampled_from([OffPolicy(0), OffPolicy(1), OffPolicy(4), OffPolicy(steps_per_batch=3)]),
    oracle=st.booleans(),
)
def test_every_token_is_generated_once_and_within_the_bound(
    work: Workload, policy: SchedulingPolicy, scheme: OffPolicy, oracle: bool
) -> None:
    expected = known(work) if oracle else from_history(work)
    out = simulate(work, SLOW, policy, expected, scheme)
    tokens = sum(group.tokens for group in work.groups)
    assert out.generated_tokens == out.trained_tokens == sum(out.staleness.values()) == tokens
    assert out.trained == [[n for group in work.step(t) for n in group.lengths] for t in range(work.steps)]
    k = scheme.steps_ahead + scheme.steps_per_batch - 1
    assert min(out.staleness) >= 0
    assert max(out.staleness) <= k
    assert out.makespan >= lower_bound(work, SLOW, scheme) - 1e-6
    assert 0 <= out.generator_idle <= 1
    assert out.running <= SLOW.concurrency


@given(work=workloads())
@settings(max_examples=50)
def test_rounds_train_every_group_once(work: Workload) -> None:
    lengths = Counter(n for group in work.groups for n in group.lengths)
    continued = april(work, SLOW)
    assert Counter(n for step in continued.trained for n in step) == lengths
    assert continued.generated_tokens == continued.trained_tokens == sum(continued.staleness.values())
    batched = tail_batching(work, SLOW)
    assert sum(map(len, batched.trained)) == sum(lengths.values())
    assert batched.generated_tokens >= batched.trained_tokens
    assert max(batched.staleness) == 0
    assert len(batched.trained) == len(continued.trained) == work.steps


def test_run_by_hand() -> None:
    """One generator with room for two sequences: 10 tokens beside another take 15 s, and the last 10 alone 12.5 s."""
    cluster = Cluster(1, 2, DecodeSpeed(1.0, 0.25), 5.0, 0.1, 2.0)
    work = Workload([Group((0, 0), (10, 20)), Group((0, 1), (4, 4))], 1)
    out = simulate(work, cluster, SlotOrder(), from_history(work), OffPolicy(0))
    first = 10 * 1.5 + 10 * 1.25 + 5.0 + 30 * 0.1
    assert out.trained_at == pytest.approx([first, first + 2.0 + 4 * 1.5 + 5.0 + 8 * 0.1])
    assert out.running == pytest.approx((2 * 15.0 + 12.5 + 2 * 6.0) / out.makespan)


def test_longest_first_ends_sooner_and_history_is_enough() -> None:
    """Two epochs of a long prompt between short ones, on one generator that holds two sequences."""
    cluster = Cluster(1, 2, DecodeSpeed(1.0, 0.0), 0.0, 0.0, 0.0)
    epoch = [Group((0, n), (length,)) for n, length in enumerate((10, 10, 10, 10, 100))]
    work = Workload(epoch * 2, 5)
    ends = {
        policy: simulate(work, cluster, policy, from_history(work), OffPolicy(0)).trained_at
        for policy in POLICIES
    }
    first, second = ends[POLICIES[0]]
    by_length = ends[POLICIES[3]]
    assert by_length[0] == first == 120  # nothing is known yet
    assert (second - first, by_length[1] - by_length[0]) == (120, 100)


def test_histopipe_alternates_ranges_of_length() -> None:
    slots = [
        OpenSlot(slot, step, tokens)
        for step in (1, 2)
        for slot, tokens in enumerate((5.0, 9.0, 1.0, 7.0), 4 * step)
    ]
    assigned = HistoPipe().assign(SchedulerInput(slots, [Generator("b", 8), Generator("a", 3)]))
    tokens = {name: [place.tokens for place in mine] for name, mine in assigned.items()}
    assert tokens == {"a": [1.0, 5.0, 9.0], "b": [7.0, 9.0, 7.0, 5.0, 1.0]}


# --- drafts ---------------------------------------------------------------------------------------


def test_run_with_drafts_by_hand() -> None:
    """Drafts of two tokens, whether they pay or not, yield 1 + 1/2 + 1/4; beside a sequence without, each step verifies two tokens
    more."""
    cluster = Cluster(1, 2, DecodeSpeed(1.0, 0.25, 0.5), 0.0, 0.0, 0.0)
    work = Workload([Group((0, 0), (35,), Drafts.measured(1.75, 2, fixed=True)), Group((0, 1), (30,))], 2)
    out = simulate(work, cluster, SlotOrder(), from_history(work), OffPolicy(0))
    assert out.makespan == pytest.approx(20 * (1.5 + 1.0) + 10 * 1.25)


@pytest.mark.parametrize(
    ("running", "acceptance", "per_draft"),
    [(1, 0.9, 1e-4), (8, 0.9, 1e-4), (64, 0.9, 1e-4), (256, 0.9, 1e-4), (64, 0.6, 1e-4), (256, 0.6, 3e-4)],
)
def test_drafts_are_as_long_as_a_server_learns(running: int, acceptance: float, per_draft: float) -> None:
    """As fast within 8 % as with the threshold that the server learns of its own steps."""
    speed, longest = DecodeSpeed(8e-3, 1e-4, per_draft), 16
    threshold, rates = DraftThreshold(), []
    for step in range(600):
        least = threshold.value(running)
        # The batch varies by a tenth, and so do drafts.
        rows = max(1, running - step % max(running // 10, 1))
        length = max(0, sum(acceptance**at >= least for at in range(1, longest + 1)) - step % 2)
        tokens = rows * sum(acceptance**at for at in range(length + 1))
        seconds = speed.seconds(rows, rows * length)
        threshold.observe(seconds=seconds, rows=rows, drafted=rows * length, sampled=round(tokens))
        rates.append(tokens / seconds)
    seconds, (tokens,) = speed.step([(Drafts(acceptance), running)], longest)
    assert sum(rates[300:]) / 300 == pytest.approx(running * tokens / seconds, rel=0.08)


def test_tokens_are_free_while_a_step_waits_for_memory() -> None:
    """Of 120 free tokens 8 sequences use 8; a full batch pays for each one."""
    speed = DecodeSpeed(8e-3, 1e-4, 1e-3, free_rows=120)
    assert speed.step([(Drafts(0.9), 8)], 14)[0] == speed.seconds(8)
    assert speed.step([(Drafts(0.9), 256)], 14) == (speed.seconds(256), [1.0])


def test_drafts_of_a_trace_are_fitted_and_its_makespan_is_found(tmp_path: Path) -> None:
    run = read_trace(write_trace(tmp_path / "trace.jsonl", drafts=True))
    decode = fit_decode(run)
    assert (decode.seconds(4), decode.per_draft) == (pytest.approx(0.014), pytest.approx(0.0007))
    assert [group.drafts.acceptance for group in run.work.groups[1:3]] == [pytest.approx(0.618, abs=1e-3), 0]
    cluster = Cluster(1, 8, decode, *fit_trainer(run), 0.5)
    out = simulate(run.work, cluster, SlotOrder(), from_history(run.work), OffPolicy(0))
    assert out.makespan == pytest.approx(run.makespan)


def test_command_says_what_drafts_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace.jsonl")
    options = "--json --drafts none --drafts traced --drafts 5:12 --decode .01 .001 --verify .0001 0"
    assert main(["simulate", str(tmp_path), *options.split()]) == DONE
    found = json.loads(capsys.readouterr().out)
    none, traced, given = (found["policies"][f"slotOrder, {name}"] for name in ("none", "traced", "5:12"))
    assert none == traced
    assert given["makespan"] < none["makespan"]
    assert found["trained_at"]["slotOrder, 5:12"][0] == found["trained_at"]["slotOrder, none"][0], (
        "no history"
    )
    assert found["lower_bound"] <= given["makespan"]


def test_drafts_are_at_most_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace.jsonl", drafts=True)
    given = "--json --drafts 5:12 --decode .01 .001 --verify .0001 0"
    makespans = []
    for longest in ("", " --max-draft-tokens 2", " --max-draft-tokens 16"):
        assert main(["simulate", str(tmp_path), *(given + longest).split()]) == DONE
        [figures] = json.loads(capsys.readouterr().out)["policies"].values()
        makespans.append(figures["makespan"])
    assert makespans[0] == makespans[1] > makespans[2]


@pytest.mark.parametrize("field", ["seconds", "leased"])
def test_negative_times_of_a_group_are_refused(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.jsonl")
    first, second, *rest = path.read_text().splitlines()
    line = trace.encode(msgspec.structs.replace(trace.decode(second), **{field: -1.0})).decode()
    path.write_text("\n".join([first, line, *rest, ""]))
    assert main(["simulate", str(path)]) == BAD_INPUT
    assert "seconds and leased must not be negative" in capsys.readouterr().err


def test_run_without_a_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path)]) == BAD_INPUT
    assert "trace.jsonl: no such file; a run writes it with spec.trace: true" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["many", "5", "0.5:2", "4:3", "inf:inf", "nan:2"])
def test_drafts_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "trace.jsonl", "--drafts", text])
    assert "write none, traced, or TOKENS:DRAFTED" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--verify -1 0", "--verify 0 nan", "--decode inf 0", "--train -1 0", "--publish nan"]
)
def test_times_that_are_none_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "trace.jsonl", *option.split()])
    printed = capsys.readouterr().err
    assert "is below 0" in printed or "is not finite" in printed


# --- traces ---------------------------------------------------------------------------------------


def write_trace(path: Path, steps: int = 6, *more: str, drafts: bool = False) -> Path:
    """One generator, a decoding step of 10 ms and 1 ms a sequence; steps of 2 s and 10 ms a token; a publish of .5 s. drafts: in
    every second step, two tokens for each sequence, of .7 ms, of which one is accepted."""
    lines: list[trace.AnyLine] = [
        trace.RunLine(
            t=0.0,
            format=1,
            prompts_per_step=2,
            completions_per_prompt=2,
            max_completion_tokens=900,
            max_staleness_steps=0,
            concurrency=8,
            max_draft_tokens=2 if drafts else 0,
        )
    ]
    now = 0.0
    for step in range(steps):
        lengths = [[100 * (1 + step % 3)] * 2] * 2 if step % 2 else [[200, 200], [200, 200]]
        seconds = lengths[0][0] * (0.010 + 0.001 * 4)
        if drafts and step % 2 == 0:
            seconds = lengths[0][0] / 2 * (0.010 + 0.001 * 4 + 0.0007 * 8)
        lines += [
            trace.GroupLine(
                t=now + seconds,
                slot=2 * step + n,
                step=step,
                prompt=n,
                generator="g",
                leased=now,
                lease_version=step,
                seconds=seconds,
                prompt_tokens=3,
                lengths=of,
                drafted_tokens=sum(of) * (step % 2 == 0) if drafts else None,
                accepted_tokens=sum(of) // 2 * (step % 2 == 0) if drafts else None,
            )
            for n, of in enumerate(lengths)
        ]
        trained = 2.0 + 0.01 * sum(map(sum, lengths))
        now += seconds + trained
        lines.append(trace.StepLine(t=now, step=step, busy_seconds=trained, trained_tokens=9))
        now += 0.5
        lines.append(trace.PublishLine(t=now, version=step + 1))
    path.write_text("".join(trace.encode(line).decode() + "\n" for line in lines) + "".join(more))
    return path


def test_speeds_are_fitted_and_the_makespan_is_that_of_the_trace(tmp_path: Path) -> None:
    run = read_trace(write_trace(tmp_path / "trace.jsonl"))
    decode = fit_decode(run)
    assert decode.seconds(4) == pytest.approx(0.014)
    assert fit_trainer(run) == pytest.approx((2.0, 0.01))
    assert publish_seconds(run) == pytest.approx(0.5)
    fixed, per_token = fit_trainer(run)
    out = simulate(
        run.work,
        Cluster(1, 8, decode, fixed, per_token, 0.5),
        SlotOrder(),
        from_history(run.work),
        OffPolicy(0),
    )
    assert out.makespan == pytest.approx(run.makespan)


def test_trace_continues_the_file_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step whose groups are in both files is complete."""
    path = write_trace(tmp_path / "trace.jsonl")
    whole = read_trace(path)
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "trace.jsonl.1").write_text("".join(lines[:10]))
    path.write_text("".join([lines[0], *lines[10:]]))
    assert read_trace(path) == whole
    (tmp_path / "trace.jsonl.1").write_text("".join(lines))
    path.unlink()
    assert read_trace(path) == whole
    (tmp_path / "trace.jsonl.1").write_text("nonsense\n")
    assert main(["simulate", str(tmp_path)]) == BAD_INPUT
    assert "trace.jsonl.1: line 1: JSON is malformed" in capsys.readouterr().err


def test_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace.jsonl")
    options = "--json --policy slotOrder --policy april --policy oracle --generators 4 --trainers 2 --decode .01 .001"
    assert main(["simulate", str(tmp_path), *options.split(), "--max-staleness-steps", "2"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert set(found["policies"]) == {"slotOrder", "april", "oracle"}
    assert found["policies"]["slotOrder"]["max_staleness"] <= 2
    assert found["lower_bound"] <= found["policies"]["oracle"]["makespan"]
    assert found["train"][1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("schedule", "policy"), [("", "slotOrder"), ("leastLoaded", "leastLoaded"), ("byLength", "byLength")]
)
def test_command_prints_a_table_of_the_traces_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str, policy: str
) -> None:
    """Slot order has no name in a trace."""
    path = write_trace(tmp_path / "trace.jsonl")
    path.write_text(path.read_text().replace('"concurrency":8', f'"concurrency":8,"schedule":"{schedule}"'))
    assert main(["simulate", str(path)]) == DONE
    printed = capsys.readouterr().out
    assert "6 steps of 2 groups" in printed
    assert policy in printed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense\n", "line 26: JSON is malformed"),
        ('{"kind":"group"}\n', "line 26: Object missing required field `t`"),
        ('{"kind":"other","t":1}\n', "line 26: Invalid value 'other' - at `$.kind`"),
        ('{"kind":"publish","t":-1,"version":2}\n', "line 26: t is -1.0"),
        ('{"kind":"publish","t":NaN,"version":2}\n', "line 26: JSON is malformed"),
        (
            '{"kind":"group","t":1,"slot":3,"step":0,"prompt":0,"prompt_tokens":1,"lengths":[]}\n',
            "line 26: lengths must be",
        ),
        ("x\n" * 9, "line 30: JSON is malformed: invalid character (byte 0)\nand 4 more"),
    ],
)
def test_lines_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 6, text)
    assert main(["simulate", str(path)]) == BAD_INPUT
    assert says in capsys.readouterr().err


def test_line_that_is_being_written_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 6, '{"kind":"gr')
    assert main(["simulate", str(path)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", 'the trace has no line of kind "run"'),
        (
            '{"kind":"run","t":0,"format":2,"prompts_per_step":1,"completions_per_prompt":1,"max_completion_tokens":1,'
            '"max_staleness_steps":0,"concurrency":1}\n',
            "line 1: format 2, this release reads 1",
        ),
    ],
)
def test_files_that_are_no_traces_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main(["simulate", str(path)]) == BAD_INPUT
    assert says in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "absent")]) == BAD_INPUT
