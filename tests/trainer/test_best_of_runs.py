"""A run that is one of a private selection: what it plans, records and states."""

import functools
import json

import datasets
import pytest
import tiny
import users

from hf_dp.accounting import BestOfRandomRuns, PoissonSampledGaussian, epsilon
from hf_dp.cards.verify import verify
from hf_dp.errors import UnsupportedArgumentError

pytestmark = pytest.mark.usefixtures("unchecked")

OF_A_SEARCH = {"private_selection_mean_runs": 5, "accountant": "rdp"}


def search(sigma: float, steps: int) -> BestOfRandomRuns:
    return BestOfRandomRuns((PoissonSampledGaussian(sigma, 0.2, steps),), 5)


def test_the_run_states_what_the_whole_search_costs(tmp_path):
    trainer = tiny.trained(tiny.trainer(tmp_path, **OF_A_SEARCH))
    assert trainer.ledger.events == (search(1.0, 4),)
    statement = trainer.privacy_statement()
    assert statement.epsilon == epsilon(search(1.0, 4), 1 / 80, "rdp").rounded_up(3)
    assert statement.epsilon > epsilon(search(1.0, 4).run, 1 / 80, "rdp").value
    assert statement.steps == statement.plan.steps_recorded == 4
    assert statement.noise_multipliers == (1.0,)
    trainer.save_model()
    card = " ".join((tmp_path / "README.md").read_text().split())
    assert "Hyperparameter tuning outside of this search" in card
    assert "Whether the search kept its conditions" in card
    assert "the best of a secret number of independent runs" in card and "mean 5" in card
    assert verify(tmp_path).outcome != "FAILED"
    document = json.loads((tmp_path / "privacy.json").read_text())
    document["plan"]["mechanism"]["mean_runs"] = 50  # another than in the ledger
    (tmp_path / "privacy.json").write_text(json.dumps(document))
    assert verify(tmp_path).outcome == "FAILED"


def test_the_target_is_that_of_the_search(tmp_path):
    trainer = tiny.trainer(tmp_path, **OF_A_SEARCH, target_epsilon=8)
    alone = tiny.trainer(tmp_path / "one", accountant="rdp", target_epsilon=8)
    assert trainer.run.plan.noise_multiplier > alone.run.plan.noise_multiplier
    trainer.train()
    assert 7.9 < trainer.epsilon().value <= 8


def test_a_resumed_run_goes_on_with_the_same_search(tmp_path):
    options = {**OF_A_SEARCH, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    tiny.trainer(tmp_path, **options).train()
    again = tiny.resumed(tiny.trainer(tmp_path, **options), 1)
    assert again.ledger.events == (search(1.0, 3),)  # step 2 ran twice


def test_steps_that_were_lost_leave_room_for_the_rest_of_the_search(tmp_path):
    """Steps to come are the search's own: as a second search, not one would fit."""
    options = OF_A_SEARCH | {"target_epsilon": 8, "max_steps": 6}
    saving = {"save_strategy": "steps", "save_steps": 2}
    given = {"callbacks": [tiny.StopsAfter(4)]}
    tiny.trainer(tmp_path, **options, **saving, given=given).train()
    again = tiny.resumed(tiny.trainer(tmp_path, **options, **saving), 2)
    (event,) = again.ledger.events  # 3 and 4 ran twice, so 5 and 6 do not fit
    assert event.steps == 6 and again.state.global_step == 4
    assert again.epsilon().value <= 8


def test_the_score_reads_no_training_row_by_construction(tmp_path):
    """Outside of a search it is a warning; here it would make a sentence of the card false."""
    one_equal = datasets.Dataset.from_list([*tiny.evaluation_set(), tiny.dataset()[3]])
    only_labels = one_equal.select_columns(["label"])
    for given, found in (
        (one_equal, "holds rows equal to training rows"),
        ({"own": tiny.evaluation_set(), "far": one_equal}, "'far' holds rows equal"),
        (only_labels, "cannot be compared"),
    ):
        options = {"given": {"eval_dataset": given}}
        with pytest.raises(UnsupportedArgumentError, match=found):
            tiny.trainer(tmp_path, **OF_A_SEARCH, **options)
        assert not list(tmp_path.iterdir())
        tiny.trainer(tmp_path, **options)
    trainer = tiny.trainer(tmp_path, **OF_A_SEARCH)
    for evaluation, found in ((one_equal, "holds rows equal"), (only_labels, "cannot be compared")):
        record = functools.partial(trainer.record_evaluation, {"eval_score": 1.0})
        for evaluate in (trainer.evaluate, trainer.predict, record):
            with pytest.raises(UnsupportedArgumentError, match=found):
                evaluate(evaluation)
    assert "eval_loss" in trainer.evaluate()


def test_the_score_reads_no_row_of_a_training_user(tmp_path):
    own = tiny.evaluation_set()
    others = [f"new{row}" for row in range(len(own))]

    def made(evaluation):
        of_users = {"target_delta": None, "max_rows_per_unit": 2, **OF_A_SEARCH}
        return users.trainer(tmp_path, given={"eval_dataset": evaluation}, **of_users)

    one_shared = own.add_column("who", [users.SECRET[3], *others[1:]])
    message = "training row, but .* of the same values in 'who'"
    with pytest.raises(UnsupportedArgumentError, match=message):
        made(one_shared)
    with pytest.raises(UnsupportedArgumentError, match="does not say whose its rows are"):
        made(own)
    trainer = made(own.add_column("who", others))
    with pytest.raises(UnsupportedArgumentError, match="of the same values in 'who'"):
        trainer.evaluate(one_shared)
    assert "eval_loss" in trainer.evaluate()
