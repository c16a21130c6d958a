"""``hf-dp plan --sweep --plot``: what the figure of a sweep shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawing import drawn

from hf_dp.cli.main import main
from hf_dp.cli.points import read_points

PAPER = Path(__file__).parents[2] / "recipes" / "glue" / "figure7.csv"
ROWS = ["plan", "--num-examples", "50000", "--delta", "1e-5", "--accountant", "rdp"]
CALIBRATED = [*ROWS, "--steps", "16", "--target-epsilon", "3"]
GIVEN = [*ROWS, "--batch-size", "500", "--noise-multiplier", "1"]


@pytest.fixture
def shown(monkeypatch, tmp_path, capsys):
    """A function that plots a sweep: the curves of its figure, the figure, and the forecasts."""
    found = drawn(monkeypatch, ("plot",))
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw)
    )

    def plot(*words):
        path = tmp_path / "new" / "a.png"
        assert main([*words, "--plot", str(path), "--json"]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        return found, figures[-1], json.loads(capsys.readouterr().out)["rows"]

    return plot


def test_noise_over_batch_sizes(shown):
    curves, figure, rows = shown(*CALIBRATED, "--sweep", "batch_size=12500,500,50000")
    sizes, by_size = [500, 12500, 50000], [rows[1], rows[0], rows[2]]
    noise = [row["plan"]["noise_multiplier"] for row in by_size]
    assert curves == [
        (sizes, [row["effective_noise_multiplier"] for row in by_size], "hf-dp plan"),
        (sizes, noise, "hf-dp plan"),
    ]
    effective = curves[0][1]
    assert effective == pytest.approx([noise[0] * 100, noise[1] * 4, noise[2]])
    assert figure.get_suptitle() == (
        "50,000 rows, 0.16 to 16 epochs, 16 steps, delta 1e-05, epsilon 3 by rdp, Poisson sampling"
    )
    left, right = figure.axes
    assert (left.get_xlabel(), left.get_xscale()) == ("expected batch size (rows)", "log")
    assert (left.get_yscale(), right.get_yscale()) == ("log", "log")
    assert left.get_ylabel() == "effective noise multiplier\n(noise multiplier / sample rate)"
    assert right.get_ylabel() == "noise multiplier\n(noise standard deviation / clipping norm)"
    (above,) = left.child_axes
    assert above.get_xlabel() == "sample rate"
    assert above.get_xlim() == pytest.approx([edge / 50000 for edge in left.get_xlim()])


def test_given_noise_is_left_out_for_the_epsilon_that_it_costs(shown):
    curves, figure, rows = shown(*GIVEN, "--sweep", "epochs=1,2")
    assert [label for *_, label in curves] == ["hf-dp plan", "rdp (bound)"]
    assert curves[1][1] == pytest.approx([row["results"][0]["epsilon"] for row in rows], abs=1e-3)
    left, right = figure.axes
    assert (left.get_xlabel(), right.get_ylabel()) == ("epochs", "epsilon")
    assert "batch size 500, 100 to 200 steps, delta 1e-05, noise mult" in figure.get_suptitle()
    assert not left.child_axes


def test_an_accountant_without_answer_is_named(shown, monkeypatch):
    from hf_dp.accounting import comparison
    from hf_dp.errors import AccountingRangeError

    known = comparison.epsilon

    def out_of_range(events, delta, name, relation):
        if name == "gdp_clt" or (name == "prv" and events[0].steps > 100):
            raise AccountingRangeError("too far")
        return known(events, delta, "rdp", relation)

    monkeypatch.setattr(comparison, "epsilon", out_of_range)
    curves, figure, _ = shown(*GIVEN, "--cross-check", "--sweep", "steps=100,200")
    assert [(x, label) for x, _, label in curves[1:]] == [
        ([100, 200], "pld (bound)"),
        ([100, 200], "rdp (bound)"),
        ([100], "prv (bound, no answer at 1 of 2)"),
        ([], "gdp_clt (no answer at 2 of 2)"),
    ]
    assert len(figure.axes[1].get_legend().get_texts()) == 4


def test_the_rule_of_the_paper_beside_ours(shown):
    """Li et al., figure 7: for small batches the rule gives too little noise."""
    words = [*ROWS, "--epochs", "50", "--target-epsilon", "3", "--sweep", "batch_size=195,12500"]
    curves, figure, _ = shown(*words, "--plot-beside", str(PAPER))
    _, (_, ours, _), (sizes, rule, label) = curves
    assert label == "figure7: 10.34 (B/N)^0.5"
    assert rule == pytest.approx([10.34 * (size / 50000) ** 0.5 for size in sizes], rel=4e-4)
    assert ours[0] > 1.4 * rule[sizes.index(195)]
    assert ours[1] == pytest.approx(rule[sizes.index(12500)], rel=0.05)
    assert [axes.get_legend() is None for axes in figure.axes] == [True, False]


def test_points_of_noise_beside_given_noise(shown, tmp_path):
    file = tmp_path / "paper.csv"
    file.write_text("label,epochs,noise_multiplier\nrule,1,0.5\n")
    curves, *_ = shown(*GIVEN, "--sweep", "epochs=1,2", "--plot-beside", str(file))
    assert curves[1:3] == [([1, 2], [1, 1], "hf-dp plan"), ([1], [0.5], "paper: rule")]


def test_of_many_values_some_are_marked(shown):
    _, figure, _ = shown(*ROWS, "--noise-multiplier", "1", "--sweep", "batch_size=8..32768")
    marked = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert marked == ["8", "32", "128", "512", "2048", "8192", "32768"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--plot-beside", str(PAPER)], "Give --sweep KEY=VALUES and --plot PATH"),
        (["--plot-beside", str(PAPER), "--sweep", "batch_size=1,2"], "--plot PATH with it"),
        (["--plot-beside", str(PAPER), "--plot", "a.png"], "Give --sweep KEY=VALUES"),
        (
            ["--plot-beside", str(PAPER), "--plot", "a.png", "--sweep", "epochs=1,2"],
            "lacks ['epochs']",
        ),
        (["--plot-beside", "no.csv", "--plot", "a.png", "--sweep", "epochs=1,2"], "cannot read"),
    ],
)
def test_points_that_no_figure_shows(words, match, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([*GIVEN, *words]) == 2
    captured = capsys.readouterr()
    assert match in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_the_points_of_the_paper_can_be_read():
    assert list(read_points(str(PAPER), "batch_size", "noise_multiplier").values) == [
        "10.34 (B/N)^0.5"
    ]
