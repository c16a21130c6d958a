"""Several views of a row: one clip and one count for all of them, new ones in each step."""

import json
import zlib
from collections import Counter
from pathlib import Path

import datasets
import pytest
import tiny
import tiny_images
import torch
import users
from processes import results
from silence import PLAIN_STEPS, Silent, weights
from tiny_images import NAMES
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    default_data_collator,
)

from hf_dp.accounting import PoissonSampledGaussian
from hf_dp.batches.examples import Examples
from hf_dp.batches.units import UnitBatches
from hf_dp.batches.views import ViewDraws, Views
from hf_dp.cli.main import main
from hf_dp.errors import (
    InvalidArgumentError,
    LedgerError,
    SelfCheckError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.units import Users
from hf_dp.run.engine_check import EngineCheck
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tasks.images import ToPixels, image_rows

pytestmark = pytest.mark.usefixtures("unchecked")

ROWS, K, C = 8, 3, 0.1
CHECK = EngineCheck.check  # which tests of other things leave out


def pictures(spread: float = 1.0, who: bool = False) -> datasets.Dataset:
    """Rows whose transform adds noise to their pixels: no two readings are alike."""
    torch.manual_seed(1)
    values = {"pixels": torch.rand(ROWS, 3, 8, 8).tolist(), "label": [i % 3 for i in range(ROWS)]}
    values |= {"who": [f"u{i // 2}" for i in range(ROWS)]} if who else {}

    def noisy(batch):
        clean = torch.tensor(batch["pixels"], dtype=torch.float64)
        return {"pixel_values": clean + spread * torch.randn(clean.shape), "labels": batch["label"]}

    return datasets.Dataset.from_dict(values).with_transform(noisy)


def images(folder: Path, spread: float = 1.0, **options):
    model = tiny_images.vit(num_labels=3).double()
    who = options.get("privacy_unit") == "user"
    given = {"model": model, "train_dataset": pictures(spread, who), "eval_dataset": None}
    given["data_collator"] = default_data_collator
    return made_of(folder, given, remove_unused_columns=False, **options)


def texts(folder: Path, **options):
    """Rows of 3 to 8 tokens of which each reading hides others, at times none."""
    words = tiny.tokenizer()
    words.add_special_tokens({"mask_token": "[MASK]"})
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(words), intermediate_size=24, pad_token_id=0, **sizes)
    given = {"model": BertForMaskedLM(config).double(), "eval_dataset": None}
    given["train_dataset"] = tiny.dataset(ROWS).remove_columns("label")
    given["data_collator"] = DataCollatorForLanguageModeling(words, mlm_probability=0.5)
    return made_of(folder, given, **options)


def made_of(folder, given, **options):
    values = {
        "views_per_example": K, "expected_batch_size": ROWS, "per_example_max_grad_norm": C,
        "target_delta": 1e-3, "accountant": "rdp", "report_to": "none",
    }  # fmt: skip
    return tiny.trainer(folder, given=given, **{**values, **options})


def draw(made):
    """A draw of the run's own sampler, and what cuts it into physical batches."""
    made.create_optimizer()
    loader = made.get_train_dataloader()
    return loader.dataset.__getitems__(next(iter(loader.batch_sampler))), loader.collate_fn


def by_hand(made, unit, of_users: int = 1):
    """The clipped gradient of a unit's losses over its views, each alone, and their mean."""
    parameters = list(made.model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    losses = [per_example_loss(made.model, example) for example in unit]
    for loss in losses:
        found = torch.autograd.grad(loss.sum(), parameters, allow_unused=True, retain_graph=True)
        for one, each in zip(total, found, strict=True):
            one += 0 if each is None else each / (len(unit) / of_users)
    norm = float(users.flat_of(total).norm())  # 0 where no view hides a token
    weight = min(1.0, made.run.plan.clips_to / max(norm, 1e-30))
    return [weight * one for one in total], torch.cat(losses).mean()


# -- one clip, one count --


@pytest.mark.parametrize(("kind", "size"), [(images, 2), (images, 40), (texts, 1), (texts, 7)])
def test_a_step_equals_the_loop_over_rows_and_their_views(kind, size, tmp_path):
    """Physical batches of 1 and 2 cut a row's three views apart."""
    loss = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2}
    made = kind(tmp_path, per_device_train_batch_size=size, **loss)
    drawn, cut = draw(made)
    assert [len(one.unit) for one in drawn] == [K] * ROWS
    found = made.mechanism.clip(cut(drawn))
    rows = [by_hand(made, one.unit) for one in drawn]
    for total, *each in zip(found.values.values(), *(row for row, _ in rows), strict=True):
        torch.testing.assert_close(total, sum(each), rtol=1e-8, atol=1e-12)
    means = torch.stack([mean for _, mean in rows])
    torch.testing.assert_close(found.loss_sum.double(), means.sum(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found.beside["loss"], means.clamp(0, 0.7).sum(), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("size", [1, 7])
def test_a_row_is_one_in_a_count_of_norms(size, tmp_path):
    made = texts(tmp_path, per_device_train_batch_size=size, clipping_quantile=0.5)
    made.mechanism.gauge.ratio = 1000.0  # no norm reaches the step's
    drawn, cut = draw(made)
    assert float(made.mechanism.clip(cut(drawn)).beside["count"]) == ROWS / 2


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_users_it_is_the_mean_or_sum_over_rows_of_means_over_views(reduction, tmp_path):
    of_users = {"privacy_unit": "user", "privacy_unit_column": "who", "unit_reduction": reduction}
    options = {"expected_batch_size": 4, "per_device_train_batch_size": 4, **of_users}
    made = images(tmp_path, **options)
    drawn, cut = draw(made)
    assert [len(one.unit) for one in drawn] == [2 * K] * 4
    rows = [by_hand(made, one.unit, 2 if reduction == "sum" else 1)[0] for one in drawn]
    for total, *each in zip(made.mechanism.clip(cut(drawn)).values.values(), *rows, strict=True):
        torch.testing.assert_close(total, sum(each), rtol=1e-8, atol=1e-12)
    assert "the gradient of each drawn user" in made.privacy_statement().mechanism
    assert f"of which each is the mean of {K} random views" in made.privacy_statement().mechanism


def test_rows_of_users_that_are_drawn_one_by_one_have_views_too(tmp_path):
    of_users = {"privacy_unit": "user", "privacy_unit_column": "who", "unit_sampling": "examples"}
    made = images(tmp_path, max_rows_per_unit=2, accountant="pld", **of_users)
    assert [len(one.unit) for one in draw(made)[0]] == [K] * ROWS


def moved(folder: Path, **options) -> float:
    """``|sum with a row - sum without it| / C``: its views have nearly the same large gradient."""
    made = images(folder, spread=0.01, **options)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(3)
    drawn, cut = draw(made)
    both, one = (made.mechanism.clip(cut(units)).values for units in (drawn, drawn[1:]))
    return float((users.flat(both) - users.flat(one)).norm()) / C


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 1},
        {"per_device_train_batch_size": 4, "clipping_strategy": "two_pass"},
        {"clipping": "per_layer"},
        {"clipping": "automatic", "clipping_strategy": "per_example"},
    ],
    ids=str,
)
def test_one_row_moves_a_step_by_at_most_c(options, tmp_path):
    assert 0.5 < moved(tmp_path, **options) <= 1 + ROUNDING_MARGIN


def test_planted_views_that_are_not_clipped_as_one_are_seen(not_clipped_as_one, tmp_path):
    assert moved(tmp_path, per_device_train_batch_size=1) > K - 0.5


# -- which views --

CUT, READ = UnitBatches.__call__, Examples.__getitems__


def readings(folder: Path, monkeypatch) -> list[list[bytes]]:
    """Of each unit in each step of a run, what the model sees of its views."""
    seen = []

    def watched(self, drawn):
        seen.extend([each["pixel_values"].numpy().tobytes() for each in one.unit] for one in drawn)
        return CUT(self, drawn)

    monkeypatch.setattr(UnitBatches, "__call__", watched)
    images(folder, max_steps=3).train()
    return seen


def all_differ(found: list[list[bytes]]) -> bool:
    counts = Counter(view for unit in found for view in unit)
    return len(found) == 3 * ROWS and max(counts.values()) == 1


def one_reading_for_all(self, indices):
    read = {index: READ(self, [index])[0] for index in dict.fromkeys(indices)}
    return [read[index] for index in indices]


def the_same_in_every_step(self, indices):
    kept = self.__dict__.setdefault("kept", {})
    places = [(index, list(indices[:place]).count(index)) for place, index in enumerate(indices)]
    return [kept.setdefault(each, READ(self, [each[0]])[0]) for each in places]


def test_all_views_of_all_steps_differ(tmp_path, monkeypatch):
    assert all_differ(readings(tmp_path, monkeypatch))


def test_dropout_draws_for_each_view_by_itself(tmp_path):
    given = {"model": tiny.model(dropout=0.1), "train_dataset": tiny.dataset(ROWS)}
    made = made_of(tmp_path, {**given, "eval_dataset": None}, max_steps=2)
    made.train()  # (dropout is all that differs)
    drawn, cut = draw(made)
    made.model.train()
    losses = torch.cat([made.run.losses(batch.inputs) for batch in cut(drawn)])
    assert len(losses.unique()) == K * ROWS


class FromFirstBatch(torch.nn.Module):
    """Keeps the mean of the first batch that it is trained on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, states):
        if self.training and self.mean == 0:
            self.mean.copy_(states.detach().mean())
        return states - self.mean


def test_rows_are_compared_after_the_check_on_made_up_ones(tmp_path, monkeypatch):
    """That check refuses what a forward on rows would set for good."""
    monkeypatch.setattr(EngineCheck, "check", CHECK)
    model = tiny.model(dropout=0.1)
    model.dropout = torch.nn.Sequential(model.dropout, FromFirstBatch())
    given = {"model": model, "train_dataset": tiny.dataset(ROWS), "eval_dataset": None}
    with pytest.raises(SelfCheckError, match="changed the buffer .*mean"):
        made_of(tmp_path, given).train()


@pytest.mark.parametrize("planted", [one_reading_for_all, the_same_in_every_step])
def test_planted_views_that_are_repeated_are_seen(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(Examples, "__getitems__", planted)
    monkeypatch.setattr("hf_dp.run.private_run.refuse_views", lambda *a: None)
    assert not all_differ(readings(tmp_path, monkeypatch))


# -- whole runs --

RUN = {"max_steps": 4, "expected_batch_size": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("kind", [images, texts])
def test_a_run_costs_what_one_of_single_views_costs_and_says_how_many(kind, tmp_path):
    made, one = kind(tmp_path / "views", **RUN), kind(tmp_path / "one", views_per_example=1, **RUN)
    made.train()
    made.save_model()
    single, stated = one.privacy_plan, made.privacy_statement()
    assert made.ledger.events == single.events() == (PoissonSampledGaussian(1.0, 4 / ROWS, 4),)
    assert made.privacy_plan.noise_std == single.noise_std
    assert (stated.unit, stated.unit_code) == (one.privacy_statement().unit, "example")
    assert f"DP-SGD on {K} views of each row with Poisson sampling" in stated.sentence()
    assert f"mean of {K} random views, made anew in each step," in stated.mechanism
    assert "one clipping for all views of a row" in stated.status_reason
    card = (tmp_path / "views/README.md").read_text()
    assert f"the gradient of each drawn row, the mean of {K} random views" in card
    record = read(tmp_path / "views")
    assert record.plan == made.privacy_plan and not disagreements(record)
    assert main(["verify", str(tmp_path / "views")]) == 0
    assert tiny.resumed(kind(tmp_path / "views", **RUN), 2).ledger.steps() == 6
    with pytest.raises(LedgerError, match="Cannot resume: `views_per_example` is 2 but .* 3"):
        tiny.resumed(kind(tmp_path / "views", **{**RUN, "views_per_example": 2}), 2)


class OfViews(Silent):
    """No noise, and for each reading of a row randomness of its own, in whichever process."""

    def example_seed(self, index: int | None) -> int:
        read = self.__dict__.setdefault("read", Counter())
        read[index] += 1
        return zlib.crc32(b"%d %d" % (-1 if index is None else index, read[index]))


def trained(folder: Path, size: int):
    made = images(folder, per_device_train_batch_size=size, **{**PLAIN_STEPS, "max_steps": 1})
    made.run.randomness = OfViews(0, made.run.processes.rank)
    before = weights(made)
    made.train()
    return {name: value - before[name] for name, value in weights(made).items()}


def test_the_update_does_not_depend_on_the_processes(tmp_path):
    alone = trained(tmp_path / "one", 40)
    for found in results(2, lambda: trained(tmp_path / "two", 2)):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-8, atol=1e-12)


# -- what is refused --


def test_views_that_would_all_be_the_same_are_refused_before_a_draw(tmp_path):
    made = tiny_images.rows(range(ROWS))
    mapped = made.map(lambda row: {"seed": float(torch.rand(()))})  # random once, for good

    def run(augmentation, rows=made):
        to_pixels = ToPixels(tiny_images.processor(), augmentation)
        rows = image_rows(rows, "img", "label", NAMES, to_pixels)
        given = {"train_dataset": rows, "model": tiny_images.vit(num_labels=3)}
        given |= {"data_collator": default_data_collator, "eval_dataset": None}
        made_of(tmp_path / "run", given, remove_unused_columns=False, max_steps=1).train()

    message = "`views_per_example` to be 1 for a data set whose transform is not random.*got 3.*Set"
    with pytest.raises(InvalidArgumentError, match=message):
        run([], mapped)
    assert not list(tmp_path.rglob("ledger.jsonl"))
    run(["flip"])


def test_other_arguments_that_do_not_go_with_views(tmp_path, monkeypatch):
    def refused(match, error=InvalidArgumentError, **options):
        with pytest.raises(error, match=match):
            tiny.arguments(tmp_path, views_per_example=2, **options)

    forward = {"privacy_mode": "dp_fp", "dp_fp_variant": "private_encoder"}
    refused("`views_per_example` to be left at 1 with privacy_mode='dp_fp'", **forward)
    refused("`auto_physical_batch_size` to be left at False with", auto_physical_batch_size=True)
    with pytest.raises(InvalidArgumentError, match="`views_per_example` to be .* >= 1, got 0"):
        tiny.arguments(tmp_path, views_per_example=0)
    made = images(tmp_path, per_device_train_batch_size=2)
    with pytest.raises(UnsupportedArgumentError, match="nor for several views of a row"):
        made.mechanism.find_physical_batch(None)
    monkeypatch.setattr("hf_dp.batches.views.is_sharded", lambda model: True)
    with pytest.raises(UnsupportedModelError, match="3 views .* physical batch .2 rows.*DDP"):
        made.run.check_engine()


# -- parts --


def test_draws_of_rows_and_of_users_are_read_k_times():
    draws = ViewDraws([[4, 2], [], [(1, 5)]], 2)
    assert list(draws) == [[(4, 4), (2, 2)], [], [(1, 1, 5, 5)]] and len(draws) == 3
    of_rows = [None, Users("who"), Users("who", reduction="sum")]
    assert [Views(2, each).scale(6) for each in of_rows] == [0.5, 1 / 6, 0.5]


def test_a_plan_with_views_reads_back_and_one_without_has_no_word_of_them():
    given = {"num_examples": 100, "expected_batch_size": 10, "max_steps": 5}
    for views in (1, 4):
        mechanism = DpSgdPlan(1.0, 1.0, views_per_example=views)
        plan = PrivacyPlan.solve(mechanism=mechanism, **given)
        written = json.dumps(plan.to_dict())
        assert PrivacyPlan.from_dict(json.loads(written)) == plan
        assert ("views" in written) == (views > 1) == bool(mechanism.outline(plan))
