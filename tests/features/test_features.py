"""Features: one from outside hf_dp, and the list of those that see what is not noised."""

import inspect
from pathlib import Path

import pytest
import tiny
from features import outside
from transformers import DataCollatorWithPadding

import hf_dp.features
from hf_dp import DPTrainer
from hf_dp.cli.main import main
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.features import base
from hf_dp.statement.evidence import read
from hf_dp.trainer.plain import Training
from hf_dp.trainer.private import PrivateTraining


@pytest.fixture
def registered():
    """Register a feature for one test."""
    before = list(base._FEATURES)
    yield base.register
    base._FEATURES[:] = before


def trainer(folder, **options):
    args = tiny.arguments(folder, outside.NormArguments, **options)
    collator = DataCollatorWithPadding(tiny.tokenizer())
    return DPTrainer(tiny.model(), args, collator, tiny.dataset())


def test_a_feature_from_outside_logs_and_stands_on_the_card(tmp_path):
    made = trainer(tmp_path, largest_noised_norm=0.5)
    made.train()
    made.save_model()
    (feature,) = [e for e in made.training.features if isinstance(e, outside.NoisedNorms)]
    assert feature.steps == made.state.global_step
    logged = [r["largest_noised_norm"] for r in made.state.log_history if "grad_norm" in r]
    assert len(logged) == feature.steps and max(logged) <= 0.5
    assert made.privacy_statement().status == "proven"
    assert "largest_noised_norm" in (tmp_path / "README.md").read_text()
    assert main(["verify", str(tmp_path)]) == 0


def test_its_refusal_is_one_of_the_arguments(tmp_path):
    with pytest.raises(InvalidArgumentError, match="`largest_noised_norm`"):
        trainer(tmp_path, largest_noised_norm=-1.0)


def test_nothing_of_it_is_there_unless_asked_for(tmp_path):
    made = trainer(tmp_path)
    assert not any(isinstance(each, outside.NoisedNorms) for each in made.training.features)


def test_an_observer_from_outside_makes_the_statement_not_established(tmp_path, registered):
    registered(outside.Peek)
    made = trainer(tmp_path)
    made.train()
    made.save_model()
    (peek,) = [each for each in made.training.features if isinstance(each, outside.Peek)]
    assert len(peek.seen_sums) == made.state.global_step
    statement = made.privacy_statement()
    assert statement.status == "not_established" and statement.epsilon is None
    assert "features.outside.Peek" in statement.status_reason
    assert read(tmp_path).weaknesses.observers == ("features.outside.Peek",)
    assert not any("epsilon" in name for row in made.state.log_history for name in row)
    with pytest.raises(UnsupportedArgumentError, match="No epsilon holds for this run"):
        made.epsilon()
    assert main(["verify", str(tmp_path)]) == 0


def test_an_observer_that_takes_its_place_in_its_own_way_is_named(tmp_path, registered):
    class Own(outside.Peek):
        def enter(self, run, tuner):
            """Keep nothing that Inside keeps."""

    registered(Own)
    (named,) = trainer(tmp_path).run.book.weaknesses.observers
    assert named.endswith("Own")


def test_a_feature_that_fails_as_it_leaves_keeps_no_lock(tmp_path, registered):
    class Fails(hf_dp.features.Feature):
        def leave(self, seen):
            raise RuntimeError("left badly")

    registered(Fails)
    made = trainer(tmp_path)
    with pytest.raises(RuntimeError, match="left badly"):
        made.train()
    assert made.run.book._lock is None


def test_private_training_replaces_each_of_trainers_seams():
    """What it inherited would be Trainer's own, which is not private."""
    seams = {
        name
        for name, each in vars(Training).items()
        if callable(each)
        and name != "_as_trainer"
        and "stock" in inspect.signature(each).parameters
    }
    assert {"train", "step", "loader", "log", "save"} <= seams
    assert seams <= vars(PrivateTraining).keys()


def subclasses(kind):
    return {kind} | {found for each in kind.__subclasses__() for found in subclasses(each)}


def test_what_stands_inside_the_gate():
    """A privacy review reads these, and no other feature. Add a name after such a review."""
    ours = {each for each in subclasses(base.Inside) if each.__module__.startswith("hf_dp.")}
    assert {each.__name__ for each in ours} == {"Inside", "Canaries", "PhysicalBatch", "Unnoised"}


def test_each_feature_is_imported_by_its_list_alone():
    """And by what reads it back: commands, tests, other files of the same feature."""
    folder = Path(hf_dp.features.__file__).parent
    package = folder.parent
    below = ["accounting", "plans", "clipping", "batches", "statement", "run", "mechanisms"]
    found = [
        str(path)
        for part in [*below, "tuners"]
        for path in (package / part).rglob("*.py")
        if "hf_dp.features" in path.read_text()
    ]
    assert not found
