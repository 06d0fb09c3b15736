"""docs/forecast.md: its commands are commands, its pictures are there, and what is printed is explained in it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from curve_files import ink, write_run

from scalerl_analysis.fit_text import MEANINGS
from scalerl_cli.main import main, parser
from scalerl_curvefit import FitSettings
from scalerl_curvefit.collapse import CONSECUTIVE, MAX_TRUNCATION, MIN_HISTORY
from scalerl_curvefit.compare import A_MARGIN
from scalerl_curvefit.fitting import ENOUGH_POINTS, MAX_A_WIDTH, MAX_P_BEFORE_CMID

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/forecast.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^scalerl .*$", PAGE, flags=re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_commands(command: str) -> None:
    parser().parse_args(shlex.split(command, comments=True)[1:])


def test_documented_commands_make_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"\]\((images/[^)]+)\)", PAGE)
    assert sorted(shown) == [
        "images/compare-example.png",
        "images/fit-example.png",
        "images/plan-example.png",
    ]
    for name in shown:
        picture = ROOT / "docs" / name
        assert picture.stat().st_size < 500_000
        again = tmp_path / Path(name).name
        if name == "images/compare-example.png":
            (command,) = [c for c in COMMANDS if c.startswith("scalerl compare curvefit/data/examples/")]
            assert main([*shlex.split(command)[1:], "--dir", str(tmp_path)]) == 0
            again = tmp_path / "comparison.png"
        else:
            (command,) = [c for c in COMMANDS if f"--plot docs/{name}" in c]
            assert main(shlex.split(command.replace(f"docs/{name}", str(again)))[1:]) == 0
        assert ink(again) == pytest.approx(ink(picture), rel=0.1)


def test_links_lead_to_sections() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, flags=re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert target in anchors


def test_every_line_that_is_printed_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words that open each line of a full report stand on the page."""
    curve = str(write_run(tmp_path / "c.csv"))
    more = ["--target", "0.6", "--budget", "2e7", "--at", "3e7"]
    assert main(["fit", curve, *more]) == 0
    report = capsys.readouterr().out
    for words in (
        "reward at 2× compute",
        "state",
        "by the next doubling of compute",
        "up to the asymptote",
        "at the margin",
        "compute to a reward",
        "burn-in",
        "noise of one evaluation",
        "eyond now a forecast departs by",
        "ate rise",
        "indcast",
        "compute per device-hour",
    ):
        assert words in report
        assert words in PAGE
    assert all(f"| {name} |" in PAGE for name in MEANINGS)


def test_page_states_the_constants_of_the_code() -> None:
    chosen = FitSettings()
    assert f"fewer than {ENOUGH_POINTS} points" in PAGE
    assert f"wider than {MAX_A_WIDTH:g}".replace("0.", ".") in PAGE
    assert f"probability above {MAX_P_BEFORE_CMID:g}".replace("0.", ".") in PAGE
    assert f"at most {A_MARGIN:g}".replace("0.", ".") in PAGE
    assert (CONSECUTIVE, MIN_HISTORY) == (3, 8)
    assert f"{MAX_TRUNCATION:.0%}".replace("%", " %") in PAGE
    assert f"ln {chosen.b_median:g}, sd {chosen.ln_b_sd:g}".replace(" 0.", " .") in PAGE
    assert f"{chosen.cmid_above:g} times the last" in PAGE
    assert chosen.cmid_below == 4
    assert f"sd {chosen.r0_sd:g}".replace("0.", ".") in PAGE
    assert chosen.rho == (0.0, 0.3, 0.6, 0.85)
    assert f"floor of {chosen.noise_floor:g}".replace("0.", ".") in PAGE
    assert f"near {chosen.noise_guess:g}".replace("0.", ".") in PAGE
    pooled = dict(zip(("sigmoid", "power law", "trend"), chosen.pool, strict=True))
    for name, weight in pooled.items():
        assert f"| {name} | {weight:.2f} |".replace("0.", ".") in PAGE
    for value in (
        f"e^(−h/{chosen.trend_window:g})",
        f"a scale of {chosen.departure:g} and {chosen.departure_headroom:g} of the distance",
        f"Student's t with {chosen.departure_dof:g} degrees of freedom",
        f"probability {chosen.late_rise:g} in a doubling",
        f"near {chosen.noise_share:g} of the binomial",
    ):
        assert value.replace("0.", ".") in PAGE
    assert (chosen.trend_damping, chosen.pool_spread) == (0.25, 0.5)
    assert (chosen.burn_in_fraction, chosen.burn_in_keeps) == (0.2, 6)
    assert f"{chosen.burn_in_sd_factor:g} times the sd" in PAGE
