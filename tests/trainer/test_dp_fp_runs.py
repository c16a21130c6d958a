"""Whole runs of DP-FP: what each variant does, records, and lets nobody read into it."""

import json
from functools import partial
from pathlib import Path

import datasets
import pytest
import tiny
import torch
from peft import LoraConfig
from transformers import FNetConfig, FNetForSequenceClassification, TrainerCallback

from hf_dp import errors
from hf_dp.accounting import RecordRelease, SampledRecordRelease, SumAndRows, epsilon
from hf_dp.cli.main import main
from hf_dp.mechanisms import Frozen
from hf_dp.mechanisms.dp_fp import RELEASED_ROWS, PrivateEncoder
from hf_dp.mechanisms.last_layer import LastLayer, clip_vectors
from hf_dp.plans.samplers import MicroBatchSampler, PoissonSampler
from hf_dp.statement.evidence import disagreements, read
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.frost.tuner import FrostConfig

STATUS = "not established"


def made(folder: Path, variant: str, **options):
    """A trainer; a private encoder has noise on the vectors as well."""
    if variant == "private_encoder" and options.get("target_epsilon") is None:
        options = {"representation_noise_multiplier": 1.0, **options}
    return tiny.trainer(folder, privacy_mode="dp_fp", dp_fp_variant=variant, **options)


def run(folder: Path, variant: str, **options):
    return tiny.trained(made(folder, variant, **options))


def released_nothing(folder: Path) -> bool:
    return not (folder / "ledger.jsonl").exists() and not list(folder.glob("*.safetensors"))


def with_layers_above(*, frozen: bool = False) -> torch.nn.Module:
    """A model with a head of several layers."""
    model, linear = tiny.model(), torch.nn.Linear
    model.classifier = torch.nn.Sequential(linear(16, 8), torch.nn.Tanh(), linear(8, 2))
    model.classifier[2].bias.requires_grad_(not frozen)
    return model


# -- published ---


@pytest.mark.usefixtures("without_noise")
def test_one_padded_batch_gives_what_m_passes_give(tmp_path):
    """Without noise the joined multiset's gradient is the sum of the micro-batches'."""
    given = {"model": tiny.model().double()}
    trainer = made(tmp_path, "published", num_micro_batches=3, given=given)
    trainer.run.open()
    trainer.mechanism.start()
    trainer.run.book.start(10)
    micro = [[0, 5, 9], [5, 7], [], [5, 39]]
    dataset, collator = trainer.columns_for_training()

    def gradient(groups: list[list[int]]) -> list[torch.Tensor]:
        trainer.model.zero_grad()
        for group in groups:
            batches = [collator([dataset[i] for i in group])] if group else []
            trainer.run.begin_step()
            with trainer.run.release_step() as release:
                trainer.mechanism.set_gradients(trainer.mechanism.clip(batches), release)
        return [parameter.grad.clone() for parameter in trainer.model.parameters()]

    joined = gradient([[index for batch in micro for index in batch]])
    for one, apart in zip(joined, gradient(micro), strict=True):
        assert torch.allclose(one, apart, rtol=1e-9, atol=1e-12)


def test_the_status_reaches_everything_that_anyone_reads(tmp_path, capsys, warnings_of):
    recorder, said = tiny.Recorder(), warnings_of("mechanisms.dp_fp")
    given, seen = {"callbacks": [recorder]}, recorder.logs
    trainer = run(tmp_path, "published", given=given, save_strategy="steps", save_steps=2)
    (warning,) = said
    assert len(warning.splitlines()) == 2
    assert "NO differential privacy guarantee is established" in warning
    message = "No epsilon holds for this run.*gdp_clt"
    with pytest.raises(errors.UnsupportedArgumentError, match=message):
        trainer.epsilon()
    assert trainer.epsilon("gdp_clt").kind == "not established"
    statement = trainer.privacy_statement()
    assert (statement.status, statement.epsilon) == ("not_established", None)
    assert not statement.proven and all(row.epsilon is None for row in statement.epsilons)
    assert "NO differential privacy guarantee is established" in str(statement)
    assert STATUS in str(statement)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        document = json.loads((folder / "privacy.json").read_text())
        assert document["statement"]["status"] == "not_established"
        assert document["statement"]["epsilon"] is None
        assert disagreements(read(folder)) == []
        card = (folder / "README.md").read_text()
        assert "status: not_established" in card and f"Status: {STATUS}. Why:" in card
        assert "  epsilon: null\n" in card
        # No tag under which private models are looked for.
        assert "differential-privacy\n" not in card.split("---")[1]
        assert "-differentially private with respect to" not in card
    assert all("epsilon" not in logs and "grad_norm" not in logs for logs in seen)
    assert all("papers_figure_not_established" in logs for logs in seen)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][0].keys() == seen[0].keys() | {"step"}
    capsys.readouterr()
    assert main(["account", "ledger", str(tmp_path), "--cross-check"]) == 0
    shown = capsys.readouterr().out
    for text in (f"status: {STATUS}", "stated epsilon: None", "no epsilon of this run"):
        assert text in shown
    assert main(["account", "ledger", str(tmp_path), "--json"]) == 0
    assert [row["epsilon"] for row in json.loads(capsys.readouterr().out)["results"]] == [None]


def test_defaults_and_noise_are_the_papers(tmp_path):
    published = {"privacy_mode": "dp_fp", "dp_fp_variant": "published"}
    args = tiny.arguments(tmp_path, expected_batch_size=None, learning_rate=None, **published)
    assert (args.expected_batch_size, args.num_micro_batches, args.learning_rate) == (32, 32, 5e-6)
    assert (args.representation_clipping_norm, args.num_train_epochs) == (1.0, 3.0)
    assert args.accountant == "gdp_clt"
    assert tiny.arguments(tmp_path, learning_rate=None).learning_rate == 5e-5
    plan = made(tmp_path, "published", target_epsilon=1.5, max_steps=20).privacy_plan
    (event,) = plan.events()
    assert epsilon(event, plan.delta, "gdp_clt").value == pytest.approx(1.5, rel=1e-6)
    assert event.num_micro_batches == 32 and event.sample_rate == 8 / (32 * 40)


def canary_moves(folder: Path, variant: str, **options) -> list[bool]:
    """Whether the embedding of a word of one row moved in each step, with all rows drawn."""
    columns = tiny.dataset().to_dict()
    columns["input_ids"] = [[min(token, 17) for token in row] for row in columns["input_ids"]]
    columns["input_ids"][7], columns["attention_mask"][7] = [2, 18, 3], [1, 1, 1]
    dataset = datasets.Dataset.from_dict(columns)
    moved: list[bool] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradient = model.bert.embeddings.word_embeddings.weight.grad
            moved.append(gradient is not None and bool(gradient[18].any()))

    run(folder, variant, expected_batch_size=40, num_micro_batches=1, noise_multiplier=50.0, max_steps=2,
        given={"train_dataset": dataset, "callbacks": [Watch()]}, **options)  # fmt: skip
    return moved


def test_why_it_is_not_proven(tmp_path):
    """At noise 50 published shows in every step that the row is there, frozen in none."""
    assert canary_moves(tmp_path / "published", "published") == [True] * 2
    assert canary_moves(tmp_path / "frozen", "frozen") == [False] * 2


# -- frozen ---


@pytest.mark.parametrize(
    ("options", "event", "purpose"),
    [
        ({}, RecordRelease(1.0, 1), "release"),
        ({"representation_release": "fresh", "num_micro_batches": 2}, SampledRecordRelease(1.0, 0.1, 4, 2), "training"),
        ({"labels_in_vector": True}, RecordRelease(1.0, 1), "release"),
    ],
)  # fmt: skip
def test_frozen_trains_the_last_layer_alone_and_records_what_it_released(
    tmp_path, options, event, purpose
):
    model, public = tiny.model(dropout=0.1), "labels_in_vector" not in options
    before = tiny.weights(model)
    trainer = run(tmp_path, "frozen", given={"model": model}, **options)
    assert [(entry.event, entry.purpose) for entry in trainer.ledger.entries] == [(event, purpose)]
    bias = {"classifier.bias"} if public else set()
    assert tiny.moved(before, trainer.model) == {"classifier.weight"} | bias
    statement = trainer.privacy_statement()
    assert statement.status == "proven"
    assert statement.epsilon == epsilon(event, trainer.privacy_plan.delta).rounded_up()
    for said in (
        "label is stated as public" in statement.unit,
        "labels being public" in statement.sentence(),
        any("stated as public: they enter the loss" in item for item in statement.not_covered),
    ):
        assert said == public
    assert disagreements(read(tmp_path)) == []


def test_after_the_release_nothing_of_the_private_rows_is_looked_at(tmp_path, monkeypatch):
    """Rows, labels and encoder could be gone: the same steps come out of what was released."""
    trainer = made(tmp_path, "frozen")
    start = Frozen.start

    def start_and_destroy(self, checkpoint=None):
        start(self, checkpoint)
        trainer.train_dataset = None
        for parameter in self._last.below():
            parameter.data.fill_(float("nan"))

    monkeypatch.setattr(Frozen, "start", start_and_destroy)
    trainer.train()
    assert trainer.state.global_step == 4 and trainer.model.classifier.weight.isfinite().all()


@pytest.mark.parametrize("blocks", [False, True])
def test_one_record_moves_its_own_row_alone_and_by_no_more_than_the_clipping_norm(tmp_path, blocks):
    options = {"representation_clipping_norm": 0.2, "labels_in_vector": blocks}
    trainer = made(tmp_path, "frozen", **options)
    last = LastLayer(trainer.run, trainer.privacy_plan.mechanism)
    rows, labels = last.all_vectors()
    columns = trainer.train_dataset.remove_columns("label")
    with torch.no_grad():
        alone = [
            trainer.model.bert(**trainer.data_collator([row])).pooler_output for row in columns
        ]
    assert torch.allclose(rows, torch.cat(alone), atol=1e-6)
    assert labels.tolist() == trainer.train_dataset["label"]
    clipped = last.clipped(rows, labels)
    for record in range(40):
        without = rows.clone()
        without[record] = 0
        difference = clipped - last.clipped(without, labels)
        others = torch.arange(40) != record
        assert not difference[others].any() and difference[record].norm() <= 0.2 * (1 + 1e-6)
    assert (clipped.norm(dim=1) > 0.19).any()
    if not blocks:
        assert torch.equal(clipped, clip_vectors(rows, 0.2))


def test_a_resumed_run_goes_on_with_the_rows_that_were_released(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    first = run(tmp_path, "frozen", **options)
    again, checkpoint = made(tmp_path, "frozen", **options), str(tmp_path / "checkpoint-2")
    again.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(again.mechanism._vectors, first.mechanism._vectors)
    assert torch.equal(again.mechanism._labels, first.mechanism._labels)
    assert again.ledger == first.ledger and again.epsilon() == first.epsilon()
    (tmp_path / RELEASED_ROWS).unlink()
    with pytest.raises(errors.LedgerError, match="Releasing them again would cost epsilon again"):
        made(tmp_path, "frozen", **options).train(resume_from_checkpoint=checkpoint)


def test_rows_are_released_once_however_much_is_trained_on_them(tmp_path):
    trainer = run(tmp_path, "frozen", target_epsilon=3.0, noise_multiplier=None, max_steps=20)
    assert trainer.state.global_step == 20 and trainer.epsilon().value <= 3
    rows = trainer.mechanism._vectors
    (tmp_path / RELEASED_ROWS).unlink()  # what was not written is written the next time
    trainer.train()
    assert trainer.mechanism._vectors is rows and trainer.ledger.steps() == 1
    assert (tmp_path / RELEASED_ROWS).exists()


def test_it_learns_from_noisy_rows(tmp_path):
    """The words good and bad alone decide; with rows that tell (noise 0.06) the head finds them,
    with labels hidden, too."""
    dataset = tiny.dataset().map(
        lambda row: {"input_ids": [2, 4 + row["label"], 3], "attention_mask": [1] * 3}
    )
    for options in ({"labels_in_vector": True}, {"representation_release": "fresh"}):
        model = tiny.model(num_hidden_layers=2)
        for parameter in model.bert.parameters():  # the representation depends on the words
            parameter.data *= 20 if parameter.dim() == 2 else 1
        trainer = run(
            tmp_path / "-".join(options), "frozen", noise_multiplier=0.06, max_steps=40,
            learning_rate=0.1, given={"train_dataset": dataset, "model": model},
            logging_strategy="no", **options,
        )  # fmt: skip
        rows, labels = trainer.mechanism._last.all_vectors()
        assert (trainer.model.classifier(rows).argmax(1) == labels).all()


# -- private encoder ---


def draws_of(trainer) -> list[tuple[list, list]]:
    """(rows of the gradients, rows released) of each step, by their tokens."""
    seen: list[tuple[list, list]] = []
    mechanism, run = trainer.mechanism, trainer.run
    feed, start = run.feed, mechanism.start

    def tokens(batches) -> list:
        return sorted(tuple(row) for batch in batches for row in batch["input_ids"].tolist())

    def feeding(engine, batches, *more):
        seen.append((tokens(batches), []))
        return feed(engine, batches, *more)

    run.feed = feeding

    def starting(checkpoint):
        start(checkpoint)
        original = mechanism._last.vectors_of

        def releasing(batches):
            seen[-1] = (seen[-1][0], tokens(batches))
            return original(batches)

        mechanism._last.vectors_of = releasing

    mechanism.start = starting
    return seen


def has_two_draws(folder: Path) -> bool:
    """Whether gradients and vectors are of two draws in each step, as the event says."""
    trainer = made(folder, "private_encoder", max_steps=2, expected_batch_size=20)
    seen = draws_of(trainer)
    trainer.train()
    ((event, purpose),) = [(entry.event, entry.purpose) for entry in trainer.ledger.entries]
    assert (type(event), purpose, event.steps) == (SumAndRows, "training", 2)
    return all(gradients != released for gradients, released in seen)


@pytest.mark.usefixtures("unchecked")
def test_gradients_and_vectors_have_draws_of_their_own(tmp_path, monkeypatch):
    assert has_two_draws(tmp_path / "honest")
    clip = PrivateEncoder.clip

    def of_one_draw(self, batches):
        self._vector_draw = lambda: batches
        return clip(self, batches)

    monkeypatch.setattr(PrivateEncoder, "clip", of_one_draw)
    assert not has_two_draws(tmp_path / "planted")


@pytest.mark.usefixtures("unchecked")
def test_vectors_are_computed_in_the_precision_in_which_they_were_checked(tmp_path, monkeypatch):
    """In float32, though gradients are computed under bfloat16 autocast."""
    options = {"bf16": True, "max_steps": 2, "expected_batch_size": 30, "logging_steps": 1}
    trainer = made(tmp_path, "private_encoder", **options)
    inside, types = [False], {True: set(), False: set()}
    dense, original = trainer.model.bert.pooler.dense, LastLayer.vectors_of
    dense.register_forward_hook(lambda _, args, out: types[inside[0]].add(out.dtype))

    def vectors_of(self, batches):
        inside[0] = True
        try:
            return original(self, batches)
        finally:
            inside[0] = False

    monkeypatch.setattr(LastLayer, "vectors_of", vectors_of)
    trainer.train()
    trainer.train()
    assert types[True] == {torch.float32} and torch.bfloat16 in types[False]
    # The logged norm is of all gradients, the last layer's too, which have no noise of their own.
    assert not any("signal_to_noise" in row for row in trainer.state.log_history)


SHARE = {"unfreeze_ratio": 0.5, "selection_iterations": 2, "selection_sample_rate": 0.2}


@pytest.mark.parametrize(
    ("config", "labels", "target"),
    [
        (None, False, 8.0),
        (LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"), True, None),
        (FrostConfig(**SHARE, selection_noise_multiplier=1.0), False, None),
        pytest.param(FrostConfig(**SHARE), True, 8.0, marks=pytest.mark.slow),
    ],
)
def test_a_private_encoder_trains_everything_within_its_target(tmp_path, config, labels, target):
    model, noise = tiny.model(), None if target else 1.0
    before = tiny.weights(model)
    trainer = run(
        tmp_path, "private_encoder", target_epsilon=target, noise_multiplier=noise, labels_in_vector=labels,
        learning_rate=0.1, accountant="rdp", max_steps=2, given={"model": model, "peft_config": config},
    )  # fmt: skip
    assert trainer.privacy_statement().status == "proven"
    if target is not None:
        assert trainer.epsilon().value <= target
        planned = epsilon(trainer.privacy_plan.events(), trainer.privacy_plan.delta, "rdp")
        assert planned.value == pytest.approx(target, rel=2e-3)
    merged = trainer.model if config is None else trainer.model.merge_and_unload()
    changed = tiny.moved(before, merged)
    assert "classifier.weight" in changed
    assert any("encoder" in name or "embeddings" in name for name in changed)
    assert disagreements(read(tmp_path)) == []


# -- what cannot be ---


class OwnLoss(DPTrainer):
    def compute_per_example_loss(self, model, inputs):
        return super().compute_per_example_loss(model, inputs)


def of_several_labels() -> dict:
    rows = tiny.dataset().remove_columns("label").add_column("labels", [[1.0, 0.0]] * 40)
    model = tiny.model(problem_type="multi_label_classification")
    return {"model": model, "train_dataset": rows}


def tied() -> torch.nn.Module:
    model = tiny.model()
    model.bert.pooler.dense.bias = model.classifier.bias = torch.nn.Parameter(torch.zeros(16))
    model.classifier.weight = torch.nn.Parameter(torch.zeros(16, 16))
    model.classifier.out_features = model.num_labels = model.config.num_labels = 16
    return model


def with_a_frozen_head() -> torch.nn.Module:
    model = tiny.model()
    model.classifier.requires_grad_(False)
    return model


UNFIT = {  # DPTrainer's keywords, arguments, the message
    "a loss of one's own": ({}, {"cls": OwnLoss}, "the last layer trains on released vectors"),
    "tied weights": ({"model": tied()}, {}, "has no parameters of its own"),
    "FROST": ({"peft_config": FrostConfig()}, {"target_epsilon": 8.0}, "`peft_config` to be None with dp_fp"),
    "another layer": ({}, {"representation_module": "bert.pooler"}, "to be the last layer"),
    "several labels": (of_several_labels(), {"labels_in_vector": True}, "one class per example.*multi"),
    "16 bits": ({"model": tiny.model().to(torch.bfloat16)}, {}, "weights are bfloat16.*Load the model in float32"),
    "model_init": ({"model": None, "model_init": tiny.model}, {}, "`model_init` to be None with privacy_mode='dp_fp'"),
    "a head of several layers, with labels": (
        {"model": with_layers_above()}, {"representation_module": "classifier", "labels_in_vector": True},
        "labels_in_vector needs a linear last layer",
    ),
    "a frozen head": ({"model": with_a_frozen_head()}, {}, "is frozen|would stay frozen"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_frozen_is_refused_before_anything_is_released(tmp_path, case):
    given, options, message = UNFIT[case]
    with pytest.raises(errors.HfDpError, match=message):
        run(tmp_path, "frozen", given=given, **options)
    assert released_nothing(tmp_path)


def test_a_head_of_several_layers_is_proven_without_labels_in_its_vectors(tmp_path):
    options = {"given": {"model": with_layers_above()}, "representation_module": "classifier"}
    assert run(tmp_path, "frozen", **options).privacy_statement().proven


class KeepsRows(torch.nn.Module):
    """A pooler that keeps its last output in a buffer; with ``evaluation``, only there."""

    def __init__(self, pooler: torch.nn.Module, evaluation: bool):
        super().__init__()
        self.pooler, self.evaluation = pooler, evaluation
        self.register_buffer("last", torch.zeros(16))

    def forward(self, hidden):
        output = self.pooler(hidden)
        if not (self.evaluation and self.training):
            self.last.data.copy_(output[-1].detach())  # (which no version counter sees)
        return output


def keeping(evaluation: bool) -> torch.nn.Module:
    model = tiny.model()
    model.bert.pooler = KeepsRows(model.bert.pooler, evaluation)
    return model


def mixing() -> torch.nn.Module:
    """FNet mixes padding into every row: stock, and without an attention mask."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    config = FNetConfig(vocab_size=19, tpu_short_seq_length=24, max_position_embeddings=24, **small)
    return FNetForSequenceClassification(config)


KEPT = "forward pass changed .'bert.pooler.last'"
MOVED = "changes when other examples are in its batch"


@pytest.mark.parametrize(
    ("variant", "made", "message"),
    [
        ("frozen", partial(keeping, False), KEPT),
        ("frozen", partial(keeping, True), KEPT),
        ("private_encoder", partial(keeping, True), KEPT),
        ("frozen", mixing, MOVED),
        ("private_encoder", mixing, MOVED),
    ],
)
def test_a_model_that_keeps_or_mixes_rows_is_refused_before_it_sees_one(
    tmp_path, variant, made, message
):
    with pytest.raises(errors.SelfCheckError, match=message):
        run(tmp_path, variant, given={"model": made()})
    assert released_nothing(tmp_path)


@pytest.mark.parametrize("label", [2, -100, 0.25])
def test_a_label_that_is_no_class_is_not_released_as_it_is(tmp_path, label):
    columns = tiny.dataset().to_dict()
    columns["label"] = [type(label)(value) for value in columns["label"]]
    columns["label"][7] = label
    model = tiny.model(problem_type="single_label_classification")
    given = {"train_dataset": datasets.Dataset.from_dict(columns), "model": model}
    message = "protected labels to be whole|`labels` holds (2|-100|0.0, a float)"
    with pytest.raises(errors.HfDpError, match=message):
        run(tmp_path, "frozen", given=given, labels_in_vector=True)
    assert released_nothing(tmp_path)


def test_other_data_than_planned_is_refused_and_tensors_are_taken(tmp_path):
    trainer = made(tmp_path / "before", "frozen")
    trainer.train_dataset = tiny.dataset(60)
    with pytest.raises(errors.DataError, match="has 60 rows, but the privacy plan was made for 40"):
        trainer.train()
    assert not (tmp_path / "before" / RELEASED_ROWS).exists()
    trainer = run(tmp_path / "after", "frozen")
    trainer.train_dataset = tiny.dataset()
    with pytest.raises(errors.DataError, match="replaced after it was used"):
        trainer.train()
    given = {"train_dataset": tiny.dataset().with_format("torch")}
    assert run(tmp_path / "tensors", "frozen", given=given).ledger.steps() == 1


@pytest.mark.parametrize(
    ("variant", "sampler", "options"),
    [
        ("published", MicroBatchSampler, {"num_micro_batches": 4}),
        ("private_encoder", PoissonSampler, {"representation_module": "classifier", "accountant": "rdp"}),
    ],
)  # fmt: skip
def test_an_empty_draw_is_a_step(tmp_path, monkeypatch, variant, sampler, options):
    """The private encoder has a head of several layers, partly frozen."""
    monkeypatch.setattr(sampler, "draw", lambda self: [])
    made = tiny.model() if variant == "published" else with_layers_above(frozen=True)
    trainer = run(tmp_path, variant, given={"model": made}, max_steps=2, **options)
    assert trainer.ledger.steps() == 2 == trainer.state.global_step
