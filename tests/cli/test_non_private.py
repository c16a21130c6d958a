"""``--privacy_mode non_private``: every recipe as its own baseline without privacy."""

import re

import pytest
from all_recipes import RECIPES, values_of

from hf_dp.cli.config import as_asked, parse, peft_config, private_keys, read_yaml, without_privacy
from hf_dp.cli.tasks import TASKS, training_module
from hf_dp.errors import InvalidArgumentError
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.tuners.frost.tuner import SelectOnce
from hf_dp.tuners.methods import tuner_for
from hf_dp.tuners.rgp import Rgp
from hf_dp.tuners.single_entries import Masks

PRIVATE_TASKS = {
    name: values_of(name) for name in RECIPES if TASKS[values_of(name)["task"]].private
}
WORDS = ["--privacy_mode", "non_private"]
TUNERS = {"frost": SelectOnce, "pval": Masks, "param": Masks, "rgp": Rgp}


@pytest.mark.parametrize("name", PRIVATE_TASKS)
def test_every_recipe_runs_without_privacy_by_one_flag(name, capsys):
    values = PRIVATE_TASKS[name]
    kept = as_asked(values, WORDS)
    module = training_module(values["task"])
    *_, args = parse(
        [*module.ARGUMENTS, DPTrainingArguments], {**kept, "use_cpu": True}, WORDS, prog=""
    )
    assert not args.is_private
    dropped = {key for key in values if key not in kept}
    assert dropped == private_keys() & set(values)
    said = capsys.readouterr().err
    assert all(f"{key} {values[key]}" in said for key in dropped)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if "expected_batch_size" in values:
        assert batch == pytest.approx(values["expected_batch_size"], rel=0.01)
        assert args.per_device_train_batch_size * 2 > values["per_device_train_batch_size"]
        assert f"= {batch} rows" in said
    private = values.get("privacy_mode") != "non_private"
    assert args.output_dir == values["output_dir"] + ("_non_private" if private else "")
    assert (f"output_dir {args.output_dir}" in said) == private
    kind = (values.get("peft") or {}).get("peft_type")
    tuner = tuner_for(peft_config(kept.get("peft")), is_private=False)
    assert isinstance(tuner, TUNERS[kind]) if kind in TUNERS else tuner is None


def test_there_are_recipes_of_every_kind():
    kinds = {(values.get("peft") or {}).get("peft_type") for values in PRIVATE_TASKS.values()}
    assert {"frost", "pval", "rgp", "lora", "adapter", "random", None} <= kinds
    modes = {values["privacy_mode"] for values in PRIVATE_TASKS.values()}
    assert modes == {"dp_sgd", "dp_fp", "non_private"}


def test_a_batch_that_is_no_number_is_named():
    for name, values in (
        ("expected_batch_size", {"expected_batch_size": "64k"}),
        ("expected_batch_size", {"expected_batch_size": None}),
        (
            "per_device_train_batch_size",
            {"expected_batch_size": 64, "per_device_train_batch_size": -1},
        ),
    ):
        with pytest.raises(
            InvalidArgumentError, match=f"`{name}` to be a whole number of at least 1"
        ):
            without_privacy(values)


@pytest.mark.parametrize(
    ("logical", "physical", "found"),
    [
        (1024, 32, (32, 32)),
        (1024, 48, (32, 32)),
        (5971, 16, (15, 398)),  # 7 x 853: no divisor between 8 and 16
        (7, 32, (7, 1)),
        (13, 8, (7, 2)),
        (1, 8, (1, 1)),
    ],
)
def test_the_batch_stays_as_large(logical, physical, found):
    values = {"expected_batch_size": logical, "per_device_train_batch_size": physical}
    kept = without_privacy(values)
    assert (kept["per_device_train_batch_size"], kept["gradient_accumulation_steps"]) == found


def test_batches_are_divided_among_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    values = {"expected_batch_size": 1024, "per_device_train_batch_size": 64}
    kept = without_privacy(values)
    assert (kept["per_device_train_batch_size"], kept["gradient_accumulation_steps"]) == (64, 4)
    assert "64 x 4 x 4 processes = 1024 rows" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    without_privacy(values)
    assert not capsys.readouterr().err


def test_what_the_command_line_says_of_batches_wins():
    values = {"expected_batch_size": 1024, "per_device_train_batch_size": 64, "output_dir": "a"}
    kept = as_asked(values, [*WORDS, "--per_device_train_batch_size", "16"])
    assert kept["gradient_accumulation_steps"] == 64
    kept = as_asked(values, [*WORDS, "--gradient-accumulation-steps=3", "--output-dir", "b"])
    assert "gradient_accumulation_steps" not in kept and kept["output_dir"] == "a"
    assert as_asked(values, ["--learning_rate", "1"]) is values
    for size in (16, 64, 2000):  # one that does not divide the batch, too
        given = [*WORDS, "--per_device_train_batch_size", str(size)]
        kept = as_asked({**values, "expected_batch_size": 1000}, given)
        assert kept["per_device_train_batch_size"] == size
        assert kept["gradient_accumulation_steps"] == max(1, round(1000 / size))
    kept = without_privacy({**values, "gradient_accumulation_steps": 1})
    assert (kept["per_device_train_batch_size"], kept["gradient_accumulation_steps"]) == (64, 1)


def test_batches_of_groups_and_of_users(capsys):
    values = {"expected_batch_size": 32, "per_device_train_batch_size": 64}
    kept = without_privacy({**values, "rows_per_group": 8})
    assert (kept["per_device_train_batch_size"], kept["gradient_accumulation_steps"]) == (64, 4)
    assert "counts users" not in capsys.readouterr().err
    without_privacy({**values, "privacy_unit": "user", "privacy_unit_column": "who"})
    assert "expected_batch_size counts users, and these batches rows" in capsys.readouterr().err


def test_dp_fp_trains_what_it_trained(capsys):
    frozen = {"privacy_mode": "dp_fp", "dp_fp_variant": "frozen", "target_epsilon": 3}
    assert without_privacy(frozen) == {"privacy_mode": "non_private", "peft": {"peft_type": "head"}}
    published = {"privacy_mode": "dp_fp", "dp_fp_variant": "published", "target_epsilon": 3}
    kept = without_privacy(published)
    assert kept["learning_rate"] == 5e-6
    assert kept["per_device_train_batch_size"] * kept["gradient_accumulation_steps"] == 32


def test_one_tiny_training_beside_the_private_one(task):
    """(And each is evaluated where it lies.)"""
    more = {"noised_loss_budget_ratio": 0.01, "noised_loss_bound": 2.0, "sampling": "poisson"}
    task.run(per_example_max_grad_norm=0.2, **more)
    printed = task.run("train", *WORDS)
    folder = task.folder / "out_non_private"
    assert printed.splitlines()[-1] == str(folder) and "epsilon" not in printed
    for said in ("noised_loss_bound 2.0", "batches of 8 x 1 x 1 processes = 8 rows"):
        assert said in task.said
    assert (task.out / "privacy.json").exists()
    assert (folder / "model.safetensors").exists() and not (folder / "privacy.json").exists()
    (trained,) = re.findall(r"accuracy .*", printed)
    assert trained in task.run("eval", *WORDS)


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        (["train", *WORDS, "--target_epsilon", "3"], {}, "`target_epsilon` to be left at None"),
        (["train", *WORDS, "--expected_batch_size", "8"], {}, "batch is `per_device_train"),
        (["train"], {"privacy_mode": "non_private"}, "`target_epsilon` to be left at None"),
        (["eval", "--privacy_mode", "nonprivate"], {}, "Did you mean 'non_private'"),
    ],
)
def test_what_contradicts_itself_is_still_an_error(task, words, values, message):
    task.refused(message, *words, **values)
    assert not (task.folder / "out_non_private").exists()


# -- sweeps ---


@pytest.fixture
def sweep(task) -> list[str]:
    """The command and its folder."""
    return ["sweep", "--output-dir", str(task.folder / "s")]


def test_a_sweep_has_one_run_without_privacy_beside_the_private_ones(task, sweep):
    grid = ["--grid", "privacy_mode=dp_sgd,non_private", "target_epsilon=3,8", "learning_rate=1,2"]
    printed = task.run(*sweep, *grid, "--dry-run")
    labels = [line.rpartition(" seed=")[0] for line in printed.splitlines()]
    private = [
        f"privacy_mode=dp_sgd target_epsilon={e} learning_rate={r}" for e in (3, 8) for r in (1, 2)
    ]
    plain = [f"privacy_mode=non_private learning_rate={rate}" for rate in (1, 2)]
    assert labels == [*private, *plain]


def test_a_key_stands_in_one_place(task, sweep):
    words = ["--set", "learning_rate=1e-3", "--grid", "learning_rate=1e-3,2e-3", "--dry-run"]
    task.refused("`learning_rate` to stand in `--set` or in `--grid`, got both", *sweep, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "privacy_mode=non_private", "--grid", "target_epsilon=3,8"],
        ["--set", "privacy_mode=non_private", "target_epsilon=3"],
        ["--grid", "privacy_mode=non_private", "expected_batch_size=8,16"],
    ],
)
def test_a_sweep_without_privacy_takes_no_privacy_arguments(task, sweep, words):
    task.refused("beside privacy_mode=non_private", *sweep, *words, "--dry-run")


@pytest.mark.parametrize("how", ["--grid", "--set"])
def test_runs_of_a_sweep_are_told_on_their_command_line(task, sweep, how, children):
    """A file that says non_private beside private keys would be refused."""
    task.run(*sweep, how, "privacy_mode=non_private", code=1)
    (command,) = children
    config = read_yaml(command[command.index("--config") + 1])
    assert config["privacy_mode"] == "non_private" and config["target_epsilon"] == 8
    assert command.count("--privacy_mode") == 1
    assert command[command.index("--privacy_mode") + 1] == "non_private"
    kept = as_asked(config, command)
    assert "target_epsilon" not in kept
