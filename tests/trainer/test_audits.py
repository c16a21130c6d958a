"""Audits of whole runs: who takes part, what is said, what is caught, what is refused."""

import json
import math
from collections import Counter

import datasets
import faults
import numpy as np
import pytest
import tiny
import torch
import yaml
from statements import rewrite
from transformers import set_seed
from users import flat

from hf_dp.cards.verify import verify
from hf_dp.cli.main import main
from hf_dp.errors import AuditError, DataError, LedgerError, UnsupportedArgumentError
from hf_dp.features import canaries as canary_rows
from hf_dp.features.canaries import Canaries
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.publishing.publication import Publication
from hf_dp.run.ledger_file import read_own
from hf_dp.statement import audited
from hf_dp.statement.audited import AuditResult
from hf_dp.statement.evidence import disagreements, earlier_runs, read, write
from hf_dp.tuners.rgp import RgpConfig

pytestmark = pytest.mark.usefixtures("unchecked")

CANARIES, ROWS, C = 60, 40, 0.1


def trainer(folder, **options):
    options = {
        "audit_canaries": CANARIES, "expected_batch_size": 25, "target_delta": 1e-3, "max_steps": 4,
        "per_example_max_grad_norm": C, "accountant": "rdp", "per_device_train_batch_size": ROWS, **options,
    }  # fmt: skip
    given = options.pop("given", {})
    return tiny.trainer(folder, given={"train_dataset": tiny.dataset(ROWS), **given}, **options)


def test_a_run_whose_epsilon_is_0_is_audited_and_saved(tmp_path):
    """Where noise is so large that delta alone covers the run."""
    large = {
        "noise_multiplier": 50.0,
        "expected_batch_size": 2,
        "target_delta": 9e-3,
        "accountant": "pld",
    }
    made = trainer(tmp_path, max_steps=1, **large)
    made.train()
    assert made.privacy_statement().epsilon == 0 and made.run.audit is not None
    assert (tmp_path / "privacy.json").is_file()


def audit_of(run) -> Canaries:
    return next(each for each in run.inside if isinstance(each, Canaries))


def in_and_out(audit: Canaries):
    return np.flatnonzero(audit._in), np.flatnonzero(~audit._in)


# -- who takes part --


def test_canaries_are_rows_of_the_plan_and_with_losses_go_through_the_model(tmp_path):
    made = trainer(tmp_path)
    assert made.privacy_plan.num_examples == len(made.train_dataset) == ROWS + CANARIES
    assert made.privacy_plan.sample_rate == 25 / (ROWS + CANARIES)
    assert 0.1 < np.mean(audit_of(made.run)._in) < 0.9
    audit = audit_of(trainer(tmp_path, audit_scores="losses").run)
    inside, outside = in_and_out(audit)
    drawn = [3, *(ROWS + inside[:3]), *(ROWS + outside[:3])]
    assert audit.split(drawn) == [3, *(ROWS + inside[:3])]


def test_a_canary_in_the_sum_is_one_coordinate_of_length_c_and_one_left_out_is_nothing(tmp_path):
    made = trainer(tmp_path)
    made.create_optimizer()
    loader, audit = made.get_train_dataloader(), audit_of(made.run)

    def total(drawn):
        rows = audit.split(drawn)
        sums = made.mechanism.clip(loader.collate_fn(loader.dataset.__getitems__(rows))).values
        audit.clipped(sums)
        return flat(sums)

    inside, outside = in_and_out(audit)
    nothing = total([0, 1, 2])
    for canary in outside[:5]:
        assert torch.equal(total([0, 1, 2, ROWS + canary]), nothing)
    for canary in inside[:5]:
        moved = total([0, 1, 2, ROWS + canary]) - nothing
        assert float(moved.norm()) == pytest.approx(C, rel=1e-4)
        assert int((moved.abs() > C / 2).sum()) == 1
    several = total([0, 1, 2, *(ROWS + inside[:4])]) - nothing
    assert float(several.norm()) == pytest.approx(2 * C, rel=1e-4)


def test_draws_come_from_the_runs_own_sampler(tmp_path):
    audit = audit_of(trainer(tmp_path).run)
    drawn = Counter()
    for rows in audit.drawn(PoissonSampler(ROWS + CANARIES, 0.3, 400)):
        drawn.update(rows)
        drawn.update(ROWS + canary for canary in audit.waiting.popleft())
    inside, outside = in_and_out(audit)
    assert not any(drawn[ROWS + canary] for canary in outside)
    taking_part = [*range(ROWS), *(ROWS + inside)]
    # 0.3 x 400 = 120, standard deviation 9.2
    assert all(60 < drawn[row] < 190 for row in taking_part)


def test_made_up_rows_are_not_the_training_rows_and_follow_from_no_seed(tmp_path):
    made = trainer(tmp_path, audit_scores="losses")
    rows = {tuple(row["input_ids"]) for row in made.train_dataset.select(range(ROWS))}
    canaries = made.train_dataset.select(range(ROWS, ROWS + CANARIES))
    assert len({tuple(row["input_ids"]) for row in canaries}) == CANARIES
    assert not rows & {tuple(row["input_ids"]) for row in canaries}
    assert len({row["label"] for row in canaries}) > 1
    found = []
    for name in ("a", "b"):
        set_seed(7)
        made = trainer(tmp_path / name, audit_scores="losses")
        found.append(made.train_dataset.select(range(ROWS, ROWS + CANARIES))["input_ids"])
    assert list(found[0]) != list(found[1])


# -- what is said --


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    made = tiny.trained(trainer(folder, max_steps=12))
    made.save_model()
    return folder, made.privacy_statement()


def test_record_and_card_say_what_was_found(done):
    folder, statement = done
    found = statement.facts.audit
    assert statement.status == "proven" and found.canaries == CANARIES
    assert 0 <= found.bounds[0] <= statement.epsilon
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["differential_privacy"]["audit"]["correct"] == found.correct
    assert f"{found.correct} of {found.guesses} guesses about 60 canaries were right" in card
    assert "never proves one" in card and "never proves one" in str(statement)
    assert not disagreements(read(folder)) and main(["verify", str(folder)]) == 0
    # Of the coins nothing is written: the counts, and what follows from them.
    written = json.loads((folder / "privacy.json").read_text())
    counts = {"scores", "canaries", "guesses", "correct", "delta"}
    assert set(written["facts"]["audit"]) == counts
    bounds = {"epsilon_at_least", "epsilon_at_least_if_gaussian"}
    assert set(written["statement"]["audit"]) == counts | bounds


def test_an_edited_audit_is_found(done, tmp_path):
    folder, _ = done
    edited = json.loads((folder / "privacy.json").read_text())
    edited["facts"]["audit"]["correct"] = edited["facts"]["audit"]["guesses"]
    (tmp_path / "privacy.json").write_text(json.dumps(edited))
    assert main(["verify", str(tmp_path)]) == 1
    rewrite(tmp_path / "privacy.json", lambda data: None)  # with a digest of its own
    assert any(problem.startswith("audit is") for problem in disagreements(read(tmp_path)))


def test_directions_are_those_of_the_canaries_own_gradients(tmp_path):
    """Without other rows and noise, a canary that is drawn is seen as C, else as nothing."""
    made = trainer(tmp_path, audit_scores="directions", audit_canaries=1)
    made.create_optimizer()
    loader, audit = made.get_train_dataloader(), audit_of(made.run)
    for took_part in (True, False):
        audit._in[:] = took_part
        rows = audit.split([ROWS])
        sums = made.mechanism.clip(loader.collate_fn(loader.dataset.__getitems__(rows))).values
        audit._likelihood[:] = 0
        audit.noised(sums)
        (score,) = audit._likelihood
        assert score == pytest.approx(made.run.plan.clips_to if took_part else 0.0, rel=1e-3)


def test_planted_missing_clipping_is_seen_by_many_runs_with_one_canary(tmp_path, monkeypatch):
    """Each row's gradient enters with its whole length, thousands of times C. (All rows are in
    each step, and few, so that the others differ little between runs; and coins fall evenly, since
    luck with 20 coins is not what is tested.)"""
    faults.FAULTS["gradients are not clipped"](monkeypatch)
    scores, took_part, delta = np.empty(20), np.arange(20) % 2 == 0, 1e-6
    for number in range(20):
        made = trainer(
            tmp_path / str(number), given={"train_dataset": tiny.dataset(4)}, audit_canaries=1,
            audit_scores="directions", expected_batch_size=5, max_steps=1, target_epsilon=0.2,
            target_delta=delta, per_example_max_grad_norm=1e-4,
        )  # fmt: skip
        audit_of(made.run)._in[:] = took_part[number]
        made.train()
        scores[number] = audit_of(made.run)._likelihood[0]
    claim = made.epsilon().value
    found = canary_rows.guess("directions", scores, took_part, claim, delta)
    assert found.refutation(claim, made.ledger.events, "rdp")


def test_losses_are_compared_before_and_after_and_rows_may_be_a_list_or_have_a_format(tmp_path):
    made = trainer(tmp_path / "losses", audit_scores="losses", noise_multiplier=5.0, max_steps=2)
    made.train()
    found = made.privacy_statement().facts.audit
    assert found.scores == "losses" and np.ptp(audit_of(made.run)._likelihood) > 0
    rows = [dict(row) for row in tiny.dataset(ROWS)]
    given, options = {"train_dataset": rows}, {"remove_unused_columns": False, "max_steps": 1}
    made = tiny.trained(trainer(tmp_path / "list", given=given, **options))
    assert made.privacy_statement().facts.audit.canaries == CANARIES and len(rows) == ROWS
    given = {"train_dataset": tiny.dataset(ROWS).with_format("torch")}
    made = trainer(tmp_path / "torch", given=given, max_steps=1)
    assert isinstance(made.train_dataset, datasets.Dataset)
    assert made.train_dataset.format["type"] == "torch"
    made.train()


# -- what is caught --


def test_planted_far_too_little_noise_is_an_error_and_the_card_claims_nothing(
    tmp_path, monkeypatch
):
    faults.noise_times(0.02)(monkeypatch)
    many = {"audit_canaries": 200, "expected_batch_size": 60, "noise_multiplier": 4.0}
    made = trainer(tmp_path, max_steps=15, save_strategy="steps", save_steps=15, **many)
    before, conclude = [], Canaries.conclude

    def note(audit):
        before.append(read(tmp_path / "checkpoint-15"))
        conclude(audit)

    monkeypatch.setattr(Canaries, "conclude", note)
    with pytest.raises(AuditError, match="not as private as it claims.*privacy.json"):
        made.train()
    made.save_model()
    statement = made.privacy_statement()
    assert statement.status == "not_private" and "an audit told" in statement.status_reason
    assert "an audit told" in (tmp_path / "README.md").read_text()
    record = read(tmp_path)
    assert record.statement["status"] == "not_private" and not disagreements(record)
    # For good, and for the checkpoints, too: one of them has the same weights.
    assert read_own(tmp_path).weaknesses.refuted and earlier_runs(record)[-1].refuted
    assert before[0].status == "proven" and "refuted=True" in before[0].lacks(record)
    with pytest.raises(LedgerError, match="would under-report"):
        write(tmp_path, before[0])
    checkpoint = tmp_path / "checkpoint-15"
    assert read(checkpoint).refuted and verify(checkpoint).outcome == "ok"
    assert "This run is NOT private: an audit told" in (checkpoint / "README.md").read_text()
    (refusal,) = Publication.of(checkpoint).refusals
    assert refusal.startswith("This run is NOT private")


def test_planted_rows_drawn_too_often_are_an_error(tmp_path, monkeypatch):
    faults.drawn_times(40)(monkeypatch)
    few = {"expected_batch_size": 12, "noise_multiplier": 1.5, "target_delta": 1e-6}
    made = trainer(tmp_path, audit_canaries=200, max_steps=18, **few)
    with pytest.raises(AuditError):
        made.train()


# -- what is refused --


def test_directions_without_gradients_and_canaries_that_are_training_rows_are_refused(
    tmp_path, monkeypatch
):
    given = {"peft_config": RgpConfig()}
    with pytest.raises(UnsupportedArgumentError, match="`audit_scores` to be 'gradients' or"):
        trainer(tmp_path, audit_scores="directions", given=given)
    rows = [dict(row) for row in tiny.dataset(ROWS)]
    honest = canary_rows.made_up_rows

    def with_two_of_them(*args):
        return [*rows[:2], *honest(*args)[2:]]

    monkeypatch.setattr(canary_rows, "made_up_rows", with_two_of_them)
    with pytest.raises(DataError, match="are already among the training rows"):
        trainer(tmp_path, audit_scores="losses")


@pytest.mark.parametrize("scores", ["losses", "directions"])
def test_canaries_that_the_model_sees_do_not_follow_from_rows(scores, tmp_path):
    """Neither their contents nor their lengths, which other rows than these would change."""
    short, long = ([dict(row) for row in tiny.dataset(ROWS)] for _ in range(2))
    for rows, length in ((short, 3), (long, 9)):
        for row in rows:
            row.update({name: [1] * length for name in ("input_ids", "attention_mask")})
            row["token_type_ids"] = [1] * length
    found = []
    for name, rows in (("short", short), ("long", long)):
        options = {"audit_scores": scores, "remove_unused_columns": False}
        made = trainer(tmp_path / name, given={"train_dataset": rows}, **options)
        canaries = [made.train_dataset[ROWS + each] for each in range(CANARIES)]
        found.append({tuple((k, len(v)) for k, v in c.items() if k != "label") for c in canaries})
        assert not any(any(c["token_type_ids"]) for c in canaries)
    assert found[0] == found[1] and len(found[0]) == 1


def test_columns_that_would_take_the_length_of_a_row_are_refused(tmp_path):
    """Those of pairs of answers are not the model's inputs."""
    import preferences

    with pytest.raises(DataError, match="size from a training row"):
        preferences.trainer(tmp_path / "a", audit_canaries=20, audit_scores="losses", max_steps=2)
    made = preferences.trainer(tmp_path, audit_canaries=20, max_steps=1)
    made.train()
    assert made.privacy_statement().facts.audit.canaries == 20


def test_a_resume_and_a_second_training_are_refused(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    made = tiny.trained(trainer(tmp_path, **saving))
    again = trainer(tmp_path, **saving)
    for train in (made.train, lambda: again.train(resume_from_checkpoint=True)):
        with pytest.raises(UnsupportedArgumentError, match="not resumed"):
            train()


@pytest.mark.parametrize("guesses", [50, 400])
def test_the_strongest_result_of_a_design_is_named(guesses, monkeypatch):
    """All right of r fair guesses: at 95 % the chance of a right one is at least 0.05^(1/r)."""
    few_right = AuditResult("gradients", guesses, guesses, guesses // 2, 1e-13)
    least = 0.05 ** (1 / guesses)
    most = math.floor(100 * math.log(least / (1 - least))) / 100
    assert f"All of them right would have shown {most:.2f} " in few_right.in_words()
    found = few_right.bounds[:1] * 2
    monkeypatch.setattr(audited, "_bounds", lambda *counts: found)
    assert f"would have shown {most:.2f} " not in few_right.in_words()  # as planted
