"""Which adapters a server has to hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scalerl_generator.weights.adapters_in_flight import AdapterVersions


@given(st.data())
def test_adapters_stay_while_requests_use_them(data: st.DataObject) -> None:
    """And until the update after the first one that finds none, since vLLM may still run a request that was left."""
    versions = AdapterVersions()
    open_requests: list[tuple[object, str]] = []
    idle_updates: Counter[str] = Counter()
    names: list[str] = []
    for version in range(data.draw(st.integers(1, 12))):
        in_use = {name for _, name in open_requests}
        needed = versions.needed()
        assert len(set(needed)) == len(needed)
        assert sorted(needed + versions.dropped) == sorted(names)
        for name in names:
            idle_updates[name] = 0 if name in in_use else idle_updates[name] + 1
            if name == names[-1] or idle_updates[name] <= 1:
                assert name in needed
            elif idle_updates[name] > 2:
                assert name not in needed
        if data.draw(st.booleans(), label="the update succeeds") or not names:
            one = versions.next(version)
            assert one.name not in names
            versions.installed(one)
            names.append(one.name)
        for _ in range(data.draw(st.integers(0, 2))):
            request = versions.request()
            own = request.__enter__()
            assert own is not None
            assert own.name == names[-1]
            open_requests.append((request, own.name))
        while open_requests and data.draw(st.booleans()):
            ended, _ = open_requests.pop(data.draw(st.integers(0, len(open_requests) - 1)))
            ended.__exit__(None, None, None)  # type: ignore[attr-defined]


def test_no_adapters_before_the_first_update() -> None:
    versions = AdapterVersions()
    assert versions.newest is None
    assert versions.needed() == []
    with versions.request() as own:
        assert own is None
