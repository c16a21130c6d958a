"""DPSentenceTransformerTrainer: a row, or a fixed group of rows, is one example."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from pages import ROOT
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer import losses, modules
from torch.nn import functional as F
from watch import watch

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.batches.groups import GroupedRows
from hf_dp.cards.verify import verify
from hf_dp.clipping import ClippingEngine
from hf_dp.errors import (
    DataError,
    InvalidArgumentError,
    SelfCheckError,
    UnsupportedArgumentError,
    UnsupportedLossError,
)
from hf_dp.publishing.allowed import sort_files
from hf_dp.run.gate import Release
from hf_dp.run.training_data import looked_up
from hf_dp.trainer.embeddings import DPSentenceTransformerTrainer

RANKING = losses.MultipleNegativesRankingLoss
C = 0.1


def model(folder: Path, *more: Any, pooling: Any = "mean") -> Any:
    torch.manual_seed(0)
    base = tiny.save(folder / "base", tiny.model(initializer_range=0.3).bert)
    pooled = modules.Pooling(16, pooling)
    return SentenceTransformer(modules=[Transformer(str(base)), pooled, *more], device="cpu")


def with_head(folder: Path) -> Any:
    return model(folder, Dense(16, 8), Normalize())


def rows(texts: int, count: int = 22, score: Any = None) -> Dataset:
    """Texts of other lengths, the number in front makes them differ, and perhaps scores."""

    def row(i: int) -> dict[str, Any]:
        made = {
            f"text_{t}": tiny.row(0, 3 * i + t, 1 + t, 1 + (i + 2 * t) % 5)["sentence"]
            for t in range(texts)
        }
        return made if score is None else {**made, "score": score(i)}

    return Dataset.from_list([row(i) for i in range(count)])


def trainer(
    folder: Path,
    made: Any,
    data: Dataset,
    loss: Any,
    kind: Any = DPSentenceTransformerTrainer,
    **options: Any,
) -> Any:
    names = ("public_negatives", "negatives_per_row", "eval_dataset", "peft_config")
    given = {name: options.pop(name) for name in names if name in options}
    args = tiny.arguments(
        folder / "out", **{"per_example_max_grad_norm": C, "max_steps": 2, **options}
    )
    return kind(made, args, train_dataset=data, loss=loss, **given)


def matryoshka(made: Any) -> Any:
    return losses.MatryoshkaLoss(made, RANKING(made), [8, 4], [1.0, 0.5])


CASES = {
    "cosine": (with_head, losses.CosineSimilarityLoss, rows(2, score=lambda i: i / 22), None),
    "triplet": (lambda at: model(at, pooling=("cls", "max")), losses.TripletLoss, rows(3), None),
    "own negatives": (lambda at: model(at, pooling="lasttoken"), RANKING, rows(4), None),
    "matryoshka": (with_head, matryoshka, rows(2), 3),
    "cosent": (lambda at: model(at, pooling="weightedmean"), losses.CoSENTLoss, rows(2, score=lambda i: i % 3 / 2), 4),
    "batch hard": (model, losses.BatchHardTripletLoss, rows(1, score=lambda i: i % 2), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_examples_are_clipped_as_by_their_own_loss_alone(case, tmp_path):
    """The oracle is sentence-transformers' own loss of the texts of one example, in float64."""
    build, loss, data, per_group = CASES[case]
    made = build(tmp_path).double()
    tested = trainer(
        tmp_path, made, data, loss(made), rows_per_group=per_group, expected_batch_size=4
    )
    examples = GroupedRows(data, per_group or 1)
    size = per_group or 1
    assert len(examples) == 22 // size
    assert examples[1] == [data[place] for place in range(size, 2 * size)]
    parameters = {name: p for name, p in made.named_parameters() if "pooler" not in name}
    alone = []
    for group in examples:
        texts = [name for name in data.column_names if name != "score"]
        scores = torch.tensor([row["score"] for row in group]) if "score" in group[0] else None
        value = tested.loss(
            [made.preprocess([row[name] for row in group]) for name in texts], scores
        )
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        alone.append(
            [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values())]
        )
    norms = torch.stack([sum(g.square().sum() for g in one).sqrt() for one in alone])
    assert norms.std() > 1e-3
    clip = float(norms.median())
    with ClippingEngine(made, clip) as engine:
        batch = tested.data_collator(list(examples))
        measured = engine.backward(tested.compute_per_example_loss(made, batch))
        sums = engine.collect()
    torch.testing.assert_close(measured, norms, rtol=1e-9, atol=1e-12)
    weights = (clip / norms).clamp(max=1)
    for place, name in enumerate(parameters):
        exact = sum(weight * one[place] for weight, one in zip(weights, alone, strict=True))
        torch.testing.assert_close(sums[name], exact, rtol=1e-3, atol=1e-9)  # the cap's slack


class InBatch(DPSentenceTransformerTrainer):
    """The planted bug: the other rows of the batch are negatives of a loss of one row."""

    def compute_per_example_loss(self, model, inputs):
        texts, others = (model(dict(each))["sentence_embedding"] for each in inputs["texts"])
        return F.cross_entropy(texts @ others.T, torch.arange(len(texts)), reduction="none")


@pytest.mark.parametrize("loss", [losses.CosineSimilarityLoss, losses.CoSENTLoss])
def test_negatives_from_the_batch_are_refused(tmp_path, loss):
    """Also where the loss of the library, which is not used then, would be refused by name."""
    made = model(tmp_path)
    tested = trainer(tmp_path, made, rows(2), loss(made), InBatch)
    with pytest.raises(SelfCheckError):
        tested.train()
    assert not tested.ledger.steps()


def noised(folder: Path, monkeypatch: Any, score: float) -> Any:
    """What enters the noise of the one step, of 4 groups of 2 equal rows, but for one's score."""
    made = model(folder)
    pair = {"text_0": "good film", "text_1": "very long plot"}
    data = Dataset.from_list([{**pair, "score": score if i == 5 else 5.0} for i in range(8)])
    loss = losses.CosineSimilarityLoss(made)
    tested = trainer(
        folder, made, data, loss, rows_per_group=2, expected_batch_size=4, max_steps=1, insecure_seed=5
    )  # fmt: skip
    with monkeypatch.context() as patch:
        seen = watch(
            patch, Release, "sum", before=lambda _, sums: {n: s.clone() for n, s in sums.items()}
        )
        tested.train()
    return tested, torch.cat([each.flatten() for each in seen[-1].values()])


@pytest.mark.filterwarnings("ignore")
def test_a_row_moves_a_step_by_twice_the_clipping_norm_and_pays_for_it(tmp_path, monkeypatch):
    (tested, before), (_, after) = (
        noised(tmp_path / str(score), monkeypatch, score) for score in (5.0, -15.0)
    )
    plan = tested.privacy_plan
    assert float(before.norm()) == pytest.approx(4 * plan.clips_to, rel=1e-4)
    assert 0.98 * C < float((before - after).norm()) / 2 == pytest.approx(plan.clips_to, rel=1e-4)
    assert plan.noise_std == pytest.approx(C, rel=1e-3) and plan.delta == 1 / 16
    of_group = PoissonSampledGaussian(1.0, 1.0, 1)
    cost = epsilon(of_group, plan.delta, relation="replace_one").value
    assert tested.epsilon("pld").value == pytest.approx(cost, abs=3e-3)
    assert cost > 1.5 * epsilon(of_group, plan.delta).value


def test_what_is_saved_is_a_sentence_transformer_with_its_card(tmp_path):
    made = with_head(tmp_path)
    run = {
        "rows_per_group": 3,
        "expected_batch_size": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "target_epsilon": 8.0,
    }
    held_out = Dataset.from_list(
        [{f"text_{t}": f"not {w} {t}" for t in range(2)} for w in tiny.WORDS[:3]]
    )
    tested = trainer(tmp_path, made, rows(2), RANKING(made), **run)
    tested.train()
    tested.save_model()
    data = tested.run.training_data()  # no row goes through the model to see whether its ids exist
    assert not looked_up(made, data.looked_over.layout, data.limits.below)
    folder = tmp_path / "out"
    again = SentenceTransformer(str(folder), device="cpu")
    texts = rows(2)["text_0"]
    assert abs(again.encode(texts) - made.encode(texts)).max() < 1e-6
    assert abs(with_head(tmp_path / "as it was").encode(texts) - made.encode(texts)).max() > 1e-3
    statement, plan = tested.privacy_statement(), tested.privacy_plan
    assert statement.status == "proven" and statement.epsilon <= 8
    assert plan.sample_rate == 3 / 7 and plan.sampler().num_examples == 7 and plan.delta == 1 / 44
    card = " ".join((folder / "README.md").read_text().split())
    for said in (
        "zero-out of one row of the training set of 22 rows", "each group of 3 rows, formed by their places",
        "it also holds for a row that is replaced by another", "library_name: sentence-transformers",
        "loss_module MultipleNegativesRankingLoss",
    ):  # fmt: skip
        assert said in card
    assert verify(folder).outcome != "FAILED"
    goes, _ = sort_files(folder)
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= goes.keys()
    texts = [made.preprocess(list(held_out[name])) for name in held_out.column_names]
    assert tested.evaluate(held_out)["eval_loss"] == pytest.approx(
        float(tested.loss(texts, None).detach())
    )
    resumed = trainer(tmp_path, with_head(tmp_path / "other"), rows(2), RANKING(made), **run)
    with pytest.raises(Exception, match="would exceed"):
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_public_negatives_are_further_texts_of_each_row(tmp_path):
    made, public = model(tmp_path), Dataset.from_dict({"text": [f"short {w}" for w in tiny.WORDS]})
    options = {"public_negatives": public, "negatives_per_row": 2}
    tested = trainer(tmp_path, made, rows(2), RANKING(made), **options)
    batch = tested.data_collator([rows(2)[0]])
    assert len(batch["texts"]) == 4
    words = made.tokenizer.batch_decode(batch["texts"][3]["input_ids"], skip_special_tokens=True)
    assert words[0] in public["text"]
    tested.train()
    assert "2 of 15 texts that the user states to be public" in str(tested.data_settings)
    for column, name in (("text_0", "text_0"), ("text_1", "text")):
        private = Dataset.from_dict({name: rows(2)[column][:]})
        with pytest.raises(DataError, match="training set"):
            trainer(tmp_path / "2", made, rows(2), RANKING(made), public_negatives=private)


@pytest.mark.parametrize("who", [str, int])
def test_users_are_protected(who, tmp_path):
    owned = rows(3, 24)
    owned = owned.add_column("owner", [who(place // 2) for place in range(24)])
    options = {"privacy_unit": "user", "privacy_unit_column": "owner", "expected_batch_size": 4}
    made = model(tmp_path)
    tested = trainer(tmp_path, made, owned, losses.TripletLoss(made), **options)
    tested.train()
    assert tested.run.plan.num_examples == 12
    with pytest.raises(UnsupportedLossError, match="negatives of their own"):
        trainer(tmp_path, made, owned.remove_columns("text_2"), RANKING(made), **options)


def test_the_negatives_of_the_recipe_are_made_of_the_row_itself():
    another = runpy.run_path(str(ROOT / "recipes/e2e/retrieval.py"))["another"]
    table = "name[Zizzi], eatType[pub], customer rating[low], area[riverside]".split(", ")
    for _ in range(20):
        made = another(", ".join(table)).split(", ")
        assert [each.split("[")[0] for each in made] == [each.split("[")[0] for each in table]
        assert sum(a != b for a, b in zip(made, table)) in (1, 2)


@pytest.mark.parametrize(
    ("loss", "texts", "options", "error", "match"),
    [
        (RANKING, 2, {}, UnsupportedLossError, "negatives of their own.*rows_per_group=8"),
        (matryoshka, 2, {}, UnsupportedLossError, "MultipleNegativesRankingLoss takes the other rows"),
        (losses.CoSENTLoss, 2, {}, UnsupportedLossError, "CoSENTLoss compares rows.*rows_per_group=8"),
        (losses.CachedMultipleNegativesRankingLoss, 3, {"rows_per_group": 2}, UnsupportedLossError, "Use MultipleNegativesRankingLoss"),
        (lambda made: losses.GISTEmbedLoss(made, made), 3, {"rows_per_group": 2}, UnsupportedLossError, "GISTEmbedLoss is not known"),
        (lambda made: losses.MatryoshkaLoss(made, RANKING(made), [8, 4], n_dims_per_step=1), 3, {}, UnsupportedLossError, "n_dims_per_step=-1"),
        (lambda made: RANKING(made, gather_across_devices=True), 3, {}, UnsupportedLossError, "gather_across_devices=False"),
        (RANKING, 3, {"privacy_mode": "non_private"}, UnsupportedArgumentError, "use SentenceTransformerTrainer"),
        (RANKING, 2, {"rows_per_group": 2, "bands": 4}, UnsupportedArgumentError, "`bands`.*rows_per_group=2"),
        (RANKING, 2, {"rows_per_group": 2, "sampling": "random_allocation"}, UnsupportedArgumentError, "`rows_per_group`.*unset"),
        (RANKING, 2, {"public_negatives": rows(1, score=lambda i: i)}, InvalidArgumentError, "`public_negatives` to have one column"),
        (RANKING, 2, {"rows_per_group": 2, "accountant": "rdp"}, UnsupportedArgumentError, "to be 'pld' with rows_per_group=2"),
    ],
)  # fmt: skip
def test_what_couples_rows_is_refused_with_the_next_move(
    loss, texts, options, error, match, tmp_path
):
    made = model(tmp_path)
    with pytest.raises(error, match=match):
        trainer(tmp_path, made, rows(texts), loss(made), **options)


def test_an_error_names_the_rows_of_a_group(tmp_path):
    made = model(tmp_path)
    bad = Dataset.from_list(
        [row if i != 4 else row | {"text_1": None} for i, row in enumerate(rows(2))]
    )
    options = {"rows_per_group": 3, "expected_batch_size": 2}
    tested = trainer(tmp_path, made, bad, RANKING(made), **options)
    with pytest.raises(DataError, match="^Rows 3 to 5 of the training set, collated"):
        tested.train()
