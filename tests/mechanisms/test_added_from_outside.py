"""A mechanism added from outside the library: Gaussian noise on the mean of frozen features.

It passes the same gate as DP-SGD, and plan, ledger, statement, card and verification know it
without a line of theirs.
"""

import json
from dataclasses import dataclass

import tiny
import torch
from transformers import DataCollatorWithPadding

from hf_dp import save_run
from hf_dp.accounting import SUM, Gaussian, Ledger, epsilon
from hf_dp.cards.card import render_card
from hf_dp.cards.details import CardDetails
from hf_dp.mechanisms import Clipped, Mechanism, mechanism_for, register_mechanism
from hf_dp.mechanisms.last_layer import clip_vectors
from hf_dp.plans import MechanismPlan, PrivacyPlan, Words, register_plan
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.evidence import disagreements, read
from hf_dp.statement.facts import RunFacts
from hf_dp.statement.statement import PrivacyStatement


@register_plan
@dataclass(frozen=True)
class FeatureMeanPlan(MechanismPlan):
    """The mean of clipped features of all examples, with noise, in each step."""

    name = "feature_mean"
    privacy_mode = "feature_mean"

    def step_event(self, schedule, noise_multiplier, steps):
        return Gaussian(noise_multiplier, steps)

    def sensitivities(self, schedule):
        return {SUM: self.clipping_norm}

    def words(self, schedule):
        what = f"the noisy mean of features clipped to {self.clipping_norm!r}"
        return Words("a feature mean", what, "none: all take part", "all rows", what, "dp", "none")


@register_mechanism
class FeatureMean(Mechanism):
    """Sets the gradient of the classifier's weight so that its first row moves to the mean."""

    plan_type = FeatureMeanPlan

    def clip(self, batches):
        model, total = self.run.model.eval(), torch.zeros(16)
        with torch.no_grad():
            for batch in batches:
                features = model.bert(batch["input_ids"], batch["attention_mask"]).pooler_output
                total += clip_vectors(features, self.plan.clipping_norm).sum(0)
        return Clipped({SUM: total}, torch.zeros(()))

    def gradients(self, clipped, release):
        mean = release.sum(clipped.values)[SUM] / self.run.plan.num_examples
        weight = self.run.model.classifier.weight
        return {weight: torch.stack([weight.detach()[0] - mean, torch.zeros_like(mean)])}


def test_it_runs_and_everything_knows_it(tmp_path):
    rows = tiny.dataset().rename_column("label", "labels")
    plan = PrivacyPlan.solve(
        num_examples=len(rows), expected_batch_size=len(rows), mechanism=FeatureMeanPlan(1.0),
        max_steps=3, target_epsilon=2.0,
    )  # fmt: skip
    model = tiny.model()
    run = PrivateRun(
        model, plan, tmp_path, train_dataset=rows,
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
    )  # fmt: skip
    mechanism = mechanism_for(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for batches in mechanism.logical_batches():
        with run.release_step() as release:
            mechanism.set_gradients(mechanism.clip(batches), release)
        optimizer.step()
    statement = save_run(mechanism)

    record = read(tmp_path)
    assert record.plan == plan and record.ledger.steps("training") == 3
    assert epsilon(record.ledger.events, plan.delta).value <= 2.0
    assert disagreements(record) == []
    assert statement.status == "proven" and "3 steps of a feature mean" in statement.sentence()
    card = render_card(statement, CardDetails(model_name="mean"))
    assert "the noisy mean of features" in card and "sampling: none" in card
    assert json.loads((tmp_path / "privacy.json").read_text())["plan"]["mechanism"]["name"] == (
        "feature_mean"
    )


@register_plan
@dataclass(frozen=True)
class NotEstablished(FeatureMeanPlan):
    """Says itself that no bound is known."""

    name = "not_established_mean"
    established = False


def test_a_plan_that_says_that_nothing_is_established_is_believed():
    plan = PrivacyPlan.solve(
        num_examples=40, expected_batch_size=40, mechanism=NotEstablished(1.0, 2.0), max_steps=1
    )
    ledger = Ledger()
    ledger.append(plan.event(1), "training")
    statement = PrivacyStatement.from_ledger(plan, ledger, RunFacts("a", "b", "c", "d"))
    assert statement.status == "not_established" and statement.epsilon is None
    assert statement.unit_code == statement.relation_code == "none"
    assert "NO differential privacy guarantee" in statement.sentence()


def test_it_is_added_in_less_than_60_lines():
    source = open(__file__, encoding="utf-8").read()
    added = source[source.index("@register_plan") : source.index("def test_it_runs")]
    assert len([line for line in added.splitlines() if line.strip()]) < 60
