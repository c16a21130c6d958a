"""``hf-dp figure``: what a picture shows, against the records that it is drawn from."""

import itertools
import json
from pathlib import Path

import pytest

from hf_dp.cli import figure as module
from hf_dp.cli.figure import read_beside
from hf_dp.cli.main import main
from hf_dp.errors import ConfigError

PAPER = Path(__file__).parents[2] / "recipes" / "glue" / "figure7.csv"
WORDS = {"template": "<S1> [MASK]", "label_words": {"a": "bad", "b": "good"}}


def row(settings, seed=0, blocks=None, **metrics):
    found = {"settings": settings, "seed": seed, "epsilon": None, "metrics": metrics}
    return {**found, **(blocks or {})}


def over_epsilon(**settings):
    """Two recipes at two epsilons, two seeds."""
    rows = []
    for recipe, target, seed in itertools.product(("full", "lora"), (2, 8), (0, 1)):
        accuracy = 0.5 + target / 100 + seed / 10 + (recipe == "lora") / 5
        where = {"recipe": recipe, "target_epsilon": target, **settings}
        rows.append(row(where, seed, accuracy=accuracy))
    return rows


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draw rows: (x, y, label) of each curve or point that matplotlib is told of, and the figure."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    found, figures = [], []
    for name in ("errorbar", "plot"):
        original = getattr(Axes, name)

        def noted(self, x, y, *args, original=original, name=name, **options):
            if not options.get("label", "_").startswith("_"):  # matplotlib's own have no name
                found.append((list(x), list(y), options["label"]))
            return original(self, x, y, *args, **options)

        monkeypatch.setattr(Axes, name, noted)
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw)
    )

    def plot(rows, *words):
        found.clear()
        (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
        picture = tmp_path / "new" / "a.png"
        assert main(["figure", str(tmp_path / "a.json"), *words, "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        return list(found), figures[-1]

    return plot


def spreads(figure):
    """The ends of the vertical bars of each curve."""
    return [
        [segment[:, 1].tolist() for segment in each.lines[2][-1].get_segments()]
        for each in figure.axes[0].containers
    ]


def texts(axes):
    """{(row, column): (text, color)} of the cells of a heat map."""
    places = ((each.get_position(), each) for each in axes.texts)
    return {(y, x): (each.get_text(), each.get_color()) for (x, y), each in places}


# -- curves ---


def test_a_curve_for_each_recipe_and_the_points_of_a_paper_beside_them(draw, tmp_path):
    file = tmp_path / "table2.csv"
    file.write_text("label,target_epsilon,accuracy\nfull,8,0.9\nfull,2,0.8\npval,2,0.7\n")
    axes = ["--x", "target_epsilon", "--y", "accuracy"]
    found, figure = draw(over_epsilon(), *axes, "--beside", str(file))
    assert found == [
        ([2, 8], pytest.approx([0.57, 0.63]), "full"),
        ([2, 8], pytest.approx([0.77, 0.83]), "lora"),
        ([2, 8], [0.8, 0.9], "table2: full"),
        ([2], [0.7], "table2: pval"),
    ]
    assert spreads(figure)[0] == [pytest.approx([0.52, 0.62]), pytest.approx([0.58, 0.68])]
    (place,) = figure.axes
    assert (place.get_xlabel(), place.get_ylabel()) == ("target_epsilon", "accuracy")
    colors = [each.lines[0].get_color() for each in place.containers]
    colors += [line.get_color() for line in place.lines if "table2" in line.get_label()]
    assert colors == ["C0", "C1", "C0", "C2"]
    found, _ = draw([*over_epsilon(max_steps=1), *over_epsilon(max_steps=2)], *axes)
    assert [label for *_, label in found] == [
        f"{recipe} max_steps={steps}" for steps in (1, 2) for recipe in ("full", "lora")
    ]


def test_a_line_for_each_family_and_setting_over_the_size(draw, tmp_path):
    sizes = {"a": ("bert", 40), "b": ("bert", 85), "c": ("roberta", 85)}
    rows = []
    for name, target, seed in itertools.product(sizes, (3, 8), (0, 2)):
        family, size = sizes[name]
        accuracy = size / 100 + target / 1000 + seed / 100
        blocks = {"size": {"family": family, "parameters": size}}
        where = {"model_name_or_path": name, "target_epsilon": target}
        rows.append(row(where, seed, blocks, accuracy=accuracy))
    file = tmp_path / "figure6.csv"
    file.write_text("label,parameters,accuracy\nroberta target_epsilon=8,85,0.5\n")
    words = ["--x", "parameters", "--y", "accuracy", "--by", "family", "target_epsilon"]
    found, figure = draw(rows, *words, "--beside", str(file))
    lines = {label: (x, pytest.approx(y)) for x, y, label in found}
    assert lines["bert target_epsilon=3"] == ([40, 85], [0.413, 0.863])
    assert lines["roberta target_epsilon=8"] == ([85], [0.868])
    assert lines["figure6: roberta target_epsilon=8"] == ([85], [0.5])
    assert len(lines) == 5


def test_trained_over_untrained_accuracy(draw):
    """Li et al., figure 8."""
    rows = [
        row({"infilling": words}, seed, {"zero_shot": {"accuracy": at}}, accuracy=0.6 + at)
        for words, at in ((WORDS, 0.5), ("sst2", 0.1))
        for seed in (0, 1)
    ]
    axes = ["--x", "zero_shot.accuracy", "--y", "metrics.accuracy"]
    assert [label for *_, label in draw(rows, *axes)[0]] == ["bad/good in '<S1> [MASK]'", "sst2"]
    assert draw(rows, *axes, "--by")[0] == [([0.1, 0.5], [0.7, 1.1], "accuracy")]


def test_a_log_over_the_steps(draw):
    rows = []
    for batch, seed in ((8, 0), (8, 1), (16, 0)):
        logs = [{"step": step, "signal_to_noise": batch * step + seed} for step in (1, 2)]
        logs.append({"step": 2, "eval_loss": 1})
        rows.append(row({"expected_batch_size": batch}, seed, {"logs": logs}, signal_to_noise=1))
    found, figure = draw(rows, "--x", "step", "--y", "logs.signal_to_noise")
    assert found == [
        ([1, 2], [8.5, 16.5], "expected_batch_size=8"),
        ([1, 2], [16, 32], "expected_batch_size=16"),
    ]
    assert spreads(figure)[0] == [[8, 9], [16, 17]]
    assert figure.axes[0].get_yscale() == "linear"


def test_the_spread_of_many_points_is_a_band(draw):
    rows = [
        row({}, seed, {"logs": [{"step": step, "loss": step + seed} for step in range(40)]})
        for seed in (0, 2)
    ]
    ((x, y, label),), figure = draw(rows, "--x", "step", "--y", "loss")
    assert (x, y, label) == (list(range(40)), [step + 1 for step in range(40)], "loss")
    (band,) = figure.axes[0].collections
    edges = {tuple(each) for each in band.get_paths()[0].vertices.tolist()}
    assert {(7, 7), (7, 9)} <= edges


# -- plans ---


def planned(capsys, *words):
    given = ["plan", "--num-examples", "50000", "--target_delta", "1e-5", "--accountant", "rdp"]
    assert main([*given, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_the_rule_of_the_paper_beside_our_noise(draw, capsys):
    """Li et al., figure 7: for small batches the rule gives too little noise."""
    sizes = [195, 12500]
    words = "--num_train_epochs 50 --target_epsilon 3 --sweep expected_batch_size=195,12500"
    rows = planned(capsys, *words.split())
    axes = ["--x", "expected_batch_size", "--y", "noise_multiplier"]
    found, figure = draw(rows, *axes, "--beside", str(PAPER))
    (x, ours, _), (places, rule, label) = found
    assert x == sizes and ours == [each["plan"]["noise_multiplier"] for each in rows]
    assert label == "figure7: 10.34 (B/N)^0.5"
    assert rule == pytest.approx([10.34 * (size / 50000) ** 0.5 for size in places], rel=4e-4)
    assert ours[0] > 1.4 * rule[places.index(195)]
    assert ours[1] == pytest.approx(rule[places.index(12500)], rel=0.05)
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "log")


def test_epsilon_by_each_accountant_and_what_has_no_answer_is_said(draw, capsys):
    rows = []
    for steps in (100, 200):
        found = {"pld": steps / 100, "prv": None if steps > 100 else 1}
        results = [{"accountant": name, "epsilon": value} for name, value in found.items()]
        planned = {"steps": steps, "accountant": "pld"}
        rows.append({"settings": {"steps": steps}, "plan": planned, "results": results})
    found, _ = draw(rows, "--x", "steps", "--y", "epsilon", "--by", "results.accountant")
    assert found == [([100, 200], [1, 2], "pld"), ([100], [1], "prv")]
    said = capsys.readouterr().err
    assert "1 of 4 records have no number for settings.steps or results.epsilon" in said


def test_accountants_are_not_averaged(tmp_path, refused):
    """Seeds are, but no two records of one seed."""
    results = [{"accountant": name, "epsilon": 1} for name in ("pld", "rdp")]
    (tmp_path / "a.json").write_text(json.dumps([{"settings": {"steps": 1}, "results": results}]))
    words = ["figure", str(tmp_path / "a.json"), "--x", "steps", "--y", "epsilon", "-o", "a.png"]
    refused(words, "they differ in ['results.accountant']")


# -- heat maps ---


def heat(values):
    return [
        row({"learning_rate": rate, "expected_batch_size": batch}, seed, bleu=value + seed)
        for (rate, batch), value in values.items()
        for seed in (-1, 1)
    ]


HEAT = ["--x", "expected_batch_size", "--y", "learning_rate", "--color", "bleu"]


def test_a_heat_map_can_be_read_in_its_bright_cells_too(draw):
    _, figure = draw(heat({(1e-3, 8): 62.94, (1e-3, 16): 40, (5e-4, 8): 10}), *HEAT)
    place = figure.axes[0]
    assert texts(place) == {
        (0, 0): ("10", "white"),
        (0, 1): ("", "black"),  # not run
        (1, 0): ("62.94", "black"),
        (1, 1): ("40", "black"),
    }
    assert (place.get_xlabel(), place.get_ylabel()) == ("expected_batch_size", "learning_rate")
    assert [text.get_text() for text in place.get_yticklabels()] == ["0.0005", "0.001"]


def test_the_values_of_a_paper_below_those_of_a_heat_map(draw, tmp_path):
    file = tmp_path / "figure2.csv"
    file.write_text("expected_batch_size,learning_rate,bleu\n8,1e-3,61.5\n8,5e-4,20\n32,1e-3,70\n")
    _, figure = draw(heat({(1e-3, 8): 62.94, (5e-4, 8): 10}), *HEAT, "--beside", str(file))
    assert texts(figure.axes[0]) == {
        (0, 0): ("10\n(20)", "white"),
        (0, 1): ("", "black"),
        (1, 0): ("62.94\n(61.5)", "black"),
        (1, 1): ("(70)", "black"),  # the paper's alone
    }
    assert figure.axes[0].get_title() == "in parentheses: figure2"


def test_a_heat_map_for_each_selection_of_frost(draw, capsys):
    """Over words, in their order; what was not chosen is blank."""
    chosen = []
    for number in (1, 2):
        parts = (
            ("a", "", "embeddings", 0.5, None),
            ("b", "0", "query", 8.0 * number, number),
            ("c", "0", "output", 1.0, 3),
            ("d", "1", "query", 2.0, None),
        )
        columns = ("name", "block", "kind", "magnitude", "order")
        parts = [dict(zip(columns, part)) for part in parts]
        settings = {"selection": number}
        chosen.append({"settings": settings, "magnitude": "mgna", "parts": parts})
    _, figure = draw(chosen, "--x", "kind", "--y", "block", "--color", "order")
    maps = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in maps] == ["selection=1", "selection=2"]
    words = {place: said for place, (said, _) in texts(maps[1]).items() if said}
    assert words == {(1, 1): "2", (1, 2): "3"}
    assert [text.get_text() for text in maps[0].get_yticklabels()] == ["-", "0", "1"]
    assert "4 of 8 records have no number for parts.order" in capsys.readouterr().err
    _, figure = draw(chosen, "--x", "kind", "--y", "block", "--color", "parts.magnitude")
    sizes = {place: said for place, (said, _) in texts(figure.axes[1]).items() if said}
    assert sizes == {(0, 0): "0.5", (1, 1): "16", (1, 2): "1", (2, 1): "2"}


# -- what is refused ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--y", "bleu"], "'metrics.accuracy', 'zero_shot.accuracy'], got 'bleu'"),
        (["--y", "accuracy"], "['metrics.accuracy', 'zero_shot.accuracy'] differ"),
        (["--x", "recipe"], "has a number for each of"),
        (["--by", "famly"], "got 'famly'"),
        (["-o", "a.foo"], "to end in one of"),
        (["--beside", "no.csv"], "`--beside` cannot read points"),
    ],
)
def test_what_is_not_drawn(words, message, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{**each, "zero_shot": {"accuracy": 0.1}} for each in over_epsilon()]
    Path("a.json").write_text(json.dumps({"rows": rows}))
    given = ["--x", "target_epsilon", "--y", "metrics.accuracy", "-o", "a.png", *words]
    refused(["figure", "a.json", *given], message)
    assert not Path("a.png").exists()


@pytest.mark.parametrize("text", ["", "[]", "[1]", '{"rows": []}'])
def test_files_without_records(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="records"):
        module.read_records(str(tmp_path / "a.json"), [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "0 rows of nothing"),
        (b"label,epsilon,accuracy\nfull,2,0.8\n", r"KeyError\('target_epsilon'\)"),
        (b"target_epsilon,accuracy\n2,0.8\n", "1 rows of .*, and the column `label`"),
        (b"label,target_epsilon,accuracy\nfull,2,86 %\n", "could not convert .*'86 %'"),
        (b"label,target_epsilon,accuracy\nfull,2\n", "cannot read points"),
        (b"label,target_epsilon,accuracy\nfull,nan,1\n", "finite numbers"),
        (b"label,target_epsilon,accuracy\nfull\xff,2,1\n", "cannot read"),
    ],
)
def test_files_of_points_that_cannot_be_shown(tmp_path, text, message):
    file = tmp_path / "points.csv"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_beside(str(file), True, ["target_epsilon", "accuracy"])


def test_planted_a_curve_that_mixes_its_seeds_up_is_seen(draw, monkeypatch):
    """The checks above tell a mean from the first seed."""
    monkeypatch.setattr(module.statistics, "mean", lambda values: values[0])
    found, _ = draw(over_epsilon(), "--x", "target_epsilon", "--y", "accuracy")
    assert found[0][1] != pytest.approx([0.57, 0.63])
