"""The loss that trains is the model's own, or the run is refused before its first draw."""

from __future__ import annotations

import contextlib

import datasets
import pytest
import tiny
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification

from hf_dp import losses
from hf_dp.errors import SelfCheckError, UnsupportedLossError
from hf_dp.losses import number_of_targets, per_example_loss
from hf_dp.run.engine_check import refuse_another_loss
from hf_dp.run.synthetic import synthetic_examples
from hf_dp.trainer.trainer import DPTrainer

SMALL = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
ENCODER_DECODER = {
    "vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
}  # fmt: skip


def made(model_class, config) -> nn.Module:
    torch.manual_seed(0)
    return model_class(config).double().eval()


def bert(model_class=hf.BertForSequenceClassification, **options):
    return made(model_class, hf.BertConfig(**SMALL, **options))


def deberta(version: str, **options):
    config = getattr(hf, f"{version}Config")(**SMALL, num_labels=3, **options)
    return made(getattr(hf, f"{version}ForSequenceClassification"), config)


def decoder(name: str):
    return made(getattr(hf, f"{name}ForCausalLM"), getattr(hf, f"{name}Config")(**ENCODER_DECODER))


def compare(model, example=None, loss=per_example_loss, rounded=False) -> None:
    refuse_another_loss(model, loss, example or synthetic_examples(model)[0], rounded=rounded)


def agrees(model, example) -> None:
    """With the model's own loss on that example alone."""
    with torch.no_grad():
        found, own = per_example_loss(model, dict(example)), model(**example).loss
    torch.testing.assert_close(found, own[None].to(found.dtype), rtol=1e-6, atol=1e-6)


# -- where transformers' own rule is another one than most classes' ---

SHIFTED_BY_THE_USER = (
    "Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "MBart", "Marian", "Mvp", "PLBart", "Pegasus",
    "TrOCR", "Whisper",
)  # fmt: skip


@pytest.mark.parametrize("name", SHIFTED_BY_THE_USER)
def test_decoders_whose_labels_the_user_shifts(name):
    model = decoder(name)
    (example, *_) = synthetic_examples(model)
    example["labels"][0, :2] = -100
    agrees(model, example)
    assert number_of_targets(model, example).tolist() == [5]
    padded = {key: F.pad(value, (0, 2), value=5) for key, value in example.items()}
    padded["attention_mask"] = (torch.arange(9) < 7).long()[None]
    torch.testing.assert_close(per_example_loss(model, padded), per_example_loss(model, {
        **example, "attention_mask": torch.ones(1, 7).long()}))  # fmt: skip


def test_xlm_and_xlnet():
    xlm = hf.XLMConfig(vocab_size=61, emb_dim=16, n_layers=1, n_heads=2, dropout=0.0)
    xlnet = hf.XLNetConfig(vocab_size=61, d_model=16, n_layer=1, n_head=2, d_inner=24, dropout=0.0)
    for model in (made(hf.XLMWithLMHeadModel, xlm), made(hf.XLNetLMHeadModel, xlnet)):
        compare(model)
    assert losses.task_of(made(hf.XLMWithLMHeadModel, xlm)) == "masked_lm"


@pytest.mark.parametrize("kind", [None, "multi_label_classification", "regression"])
@pytest.mark.parametrize("version", ["Deberta", "DebertaV2"])
def test_soft_labels(version, kind):
    model = deberta(version, problem_type=kind)
    (example, *_) = synthetic_examples(model)
    agrees(model, {**example, "labels": torch.tensor([[0.2, 0.3, 0.5]]).double()})
    agrees(bert(num_labels=3, problem_type=kind), {**example, "labels": torch.rand(1, 3).double()})


@pytest.mark.parametrize("place", range(7))
def test_a_row_with_one_label_keeps_it(place):
    """A masked language model's loss is NaN where no token is asked for, ours is 0."""
    model = bert(hf.BertForMaskedLM)
    (example, *_) = synthetic_examples(model)
    one = torch.full_like(example["labels"], -100)
    one[0, place] = 5
    compare(model, {**example, "labels": one})


# -- losses of the user's own ---


class OwnLoss(hf.BertForSequenceClassification):
    """Its forward computes ``of(logits, labels)``."""

    def forward(self, input_ids, attention_mask, labels=None):
        output = super().forward(input_ids, attention_mask)
        if labels is not None:
            output.loss = self.of(output.logits, labels)
        return output


WEIGHTS = torch.tensor([1.0, 5.0]).double()
LOSSES = {
    # The usual way to weight classes: the weights cancel in the mean over one row.
    "Weighted": lambda model, *given: F.cross_entropy(*given, weight=WEIGHTS.to(given[0].dtype)),
    "WeightedEach": lambda model, logits, labels: (
        WEIGHTS[labels].to(logits.dtype) * F.cross_entropy(logits, labels, reduction="none")
    ).mean(),
    "Smoothed": lambda model, *given: F.cross_entropy(*given, label_smoothing=0.1),
    "InTraining": lambda model, logits, labels: (
        F.cross_entropy(logits, labels) + model.training * logits.square().mean()
    ),
    "Summed": lambda model, *given: F.cross_entropy(*given, reduction="sum"),  # as the stock one
}


def own(name: str) -> type[OwnLoss]:
    return type(name, (OwnLoss,), {"of": LOSSES[name]})


class WeightedTags(hf.BertForTokenClassification):
    def forward(self, labels=None, **inputs):
        output = super().forward(**inputs)
        labels = output.logits.argmax(-1) if labels is None else labels
        output.loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), weight=WEIGHTS)
        return output


def with_a_loss_function(scale: float):
    model = bert(hf.BertLMHeadModel, is_decoder=True)
    stock = model.loss_function
    model.loss_function = lambda **given: scale * stock(**given)
    return model


def with_entities():
    config = hf.LukeConfig(**SMALL, entity_vocab_size=20, entity_emb_size=16)
    model = made(hf.LukeForMaskedLM, config)
    (example, *_) = synthetic_examples(model)
    one = torch.ones(1, 1, dtype=torch.long)
    places = torch.tensor([[[1, 2, -1, -1]]])
    entities = {"entity_ids": one, "entity_attention_mask": one, "entity_position_ids": places}
    return model, {**example, **entities}, {**example, **entities, "entity_labels": one}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "Summed"])
def test_a_loss_of_the_users_own_in_the_forward_is_refused(name):
    with pytest.raises(UnsupportedLossError, match=rf"(labels|\[0, 1\]).*by {name}"):
        compare(bert(own(name)))


def test_others_are_refused_too():
    with pytest.raises(UnsupportedLossError, match="override DPTrainer.compute_per_example_loss"):
        compare(bert(WeightedTags))
    with pytest.raises(UnsupportedLossError, match="its loss_function"):
        compare(with_a_loss_function(1.01))
    compare(with_a_loss_function(1.0))
    compare(bert(own("Summed")))
    model, plain, labeled = with_entities()
    compare(model, plain)
    with pytest.raises(UnsupportedLossError, match="by LukeForMaskedLM itself"):
        compare(model, labeled)


def test_a_loss_that_fails_where_ours_does_not_is_refused():
    class Raising(OwnLoss):
        def of(self, logits, labels):
            if labels[0] == 1:
                raise ValueError("odd label")
            return F.cross_entropy(logits, labels)

    with pytest.raises(UnsupportedLossError, match=r"fails on .*\[1\] .*odd label.*would fail"):
        compare(bert(Raising))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.001), (torch.bfloat16, 1.1)])
def test_the_tolerance_is_that_of_the_precision(dtype, scale):
    compare(bert().to(dtype))
    with pytest.raises(UnsupportedLossError):
        compare(with_a_loss_function(scale).to(dtype))
    compare(with_a_loss_function(1.005).to(dtype), rounded=True)


# -- in a run ---


def mine(model_class) -> nn.Module:
    return model_class(tiny.model().config)


def test_a_run_is_refused_before_its_first_draw(tmp_path):
    with pytest.raises(UnsupportedLossError, match="by WeightedEach itself"):
        tiny.trainer(tmp_path, given={"model": mine(own("WeightedEach"))}).train()
    assert not list(tmp_path.glob("*.jsonl")) and not list(tmp_path.glob("checkpoint*"))


def test_a_loss_that_is_named_trains(tmp_path):
    class Named(DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            labels = inputs.pop("labels")
            return 5 * F.cross_entropy(model(**inputs).logits, labels, reduction="none")

    given = {"model": mine(own("Smoothed"))}
    trainer = tiny.trained(tiny.trainer(tmp_path, cls=Named, given=given, accountant="rdp"))
    assert trainer.ledger.steps() == 4


def test_what_the_forward_writes_into_the_config_is_put_back():
    model = bert()
    compare(model)
    assert model.config.problem_type is None
    model(**synthetic_examples(model)[0])
    assert model.config.problem_type is not None  # which transformers writes


@pytest.mark.parametrize("takes_labels", [True, False])
def test_a_model_without_a_loss_is_said(takes_labels, warnings_of):
    class Without(hf.BertForSequenceClassification):
        if takes_labels:

            def forward(self, labels=None, **inputs):
                return super().forward(**inputs)
        else:

            def forward(self, input_ids, attention_mask):
                return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    said = warnings_of("run.engine_check")
    compare(bert(Without))
    assert len(said) == 1 and "Without computes no loss of its own" in said[0]


# -- planted: each rule of ours broken on purpose ---


def test_planted_rules_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "_NOT_SHIFTED", frozenset())
    monkeypatch.setattr(losses, "_SOFT_LABELS", frozenset())
    for model in (decoder("Bart"), decoder("Pegasus")):
        with pytest.raises(UnsupportedLossError, match="ForCausalLM itself"):
            compare(model)
    model = deberta("DebertaV2")
    example = synthetic_examples(model)[0] | {"labels": torch.randn(1, 3).double()}
    with pytest.raises(UnsupportedLossError, match="by DebertaV2ForSequenceClassification itself"):
        compare(model, example)
    stock = losses._LOSSES["sequence_classification"]
    monkeypatch.setitem(losses._LOSSES, "sequence_classification", lambda *given: 2 * stock(*given))
    with pytest.raises(UnsupportedLossError, match="by BertForSequenceClassification itself"):
        tiny.trainer(tmp_path).train()


# -- what a model does only from a length on is found with the longest row --

FROM = 16  # the self-check's own examples have 12 tokens at most


class ScalesWithThePaddedLength(BertForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        if input_ids.shape[1] >= FROM:
            output.logits = output.logits * 3
        return output


def rows(longest: int) -> datasets.Dataset:
    tokens = [[5 + i % 7] * length for i, length in enumerate([3, 5, 4, longest] * 10)]
    masks = [[1] * len(each) for each in tokens]
    columns = {"input_ids": tokens, "attention_mask": masks, "label": [0, 1] * 20}
    return datasets.Dataset.from_dict(columns)


def scaling() -> nn.Module:
    torch.manual_seed(0)
    return mine(ScalesWithThePaddedLength)


def trainer_on(folder, longest: int, options=None, **given):
    given = {"train_dataset": rows(longest), "eval_dataset": None, **given}
    return tiny.trainer(folder, given=given, max_steps=1, accountant="rdp", **(options or {}))


def test_a_model_that_changes_from_a_length_on_is_refused(tmp_path):
    trainer = trainer_on(tmp_path, FROM, model=scaling())
    with pytest.raises(SelfCheckError, match="beside one as long as the longest row"):
        trainer.train()
    assert len(trainer.ledger) == 0


def test_shorter_rows_and_an_ordinary_model_are_not(tmp_path):
    trainer_on(tmp_path / "shorter", FROM - 1, model=scaling()).train()
    trainer_on(tmp_path / "ordinary", FROM).train()


class KeepsWhatLengthSays(BertForSequenceClassification):
    """As dynamic rotary embeddings keep frequencies, until a batch is short."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        scale = 3.0 if input_ids.shape[1] >= FROM + 4 else 1.0
        self.scale = torch.full_like(self.scale, scale)
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        output.logits = output.logits * self.scale
        return output


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"per_device_train_batch_size": 1}, {}], ids=lambda each: str(each)
)
def test_what_a_long_row_leaves_in_a_buffer_is_refused_whatever_is_compared(tmp_path, options):
    """In 16 bits, and one by one, no row is compared beside the longest one."""
    torch.manual_seed(0)
    trainer = trainer_on(tmp_path, FROM + 4, options, model=mine(KeepsWhatLengthSays))
    with pytest.raises(SelfCheckError, match="changed the buffer or parameter 'scale'"):
        trainer.train()
    assert len(trainer.ledger) == 0


def test_where_made_up_rows_do_not_pass_the_collator(tmp_path):
    """Its own inputs, as long as the longest row, stand for them."""

    class Refuses:
        """Of rows it takes those of the data set only."""

        def __init__(self):
            self.pad = hf.DataCollatorWithPadding(tiny.tokenizer())

        def __call__(self, features):
            if any(len(set(row["input_ids"])) > 1 for row in features):
                raise ValueError("not one of ours")
            return self.pad(features)

    with pytest.raises(SelfCheckError, match="beside one as long as the longest row"):
        trainer_on(tmp_path, FROM, model=scaling(), data_collator=Refuses()).train()


def llama4() -> hf.Llama4ForCausalLM:
    torch.manual_seed(0)
    config = hf.Llama4TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, intermediate_size_mlp=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_local_experts=1, interleave_moe_layer_step=10, max_position_embeddings=64,
        no_rope_layers=[0, 0], attn_temperature_tuning=True, floor_scale=16, attn_scale=2.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_chunk_size=64,
    )  # fmt: skip
    return hf.Llama4ForCausalLM(config)


@pytest.mark.parametrize(("side", "refused"), [("left", True), ("right", False)])
def test_llama_4_scales_attention_by_places_in_the_padded_row(tmp_path, side, refused):
    """From ``floor_scale`` on, 8,192 in the published models."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = side
    tokens = [[5 + i % 7, 6, 7][: 2 + i % 2] * (1 if i % 4 else 16) for i in range(40)]
    masks = [[1] * len(each) for each in tokens]
    given = {
        "model": llama4(),
        "train_dataset": datasets.Dataset.from_dict({"input_ids": tokens, "attention_mask": masks}),
        "data_collator": hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    }
    trainer = trainer_on(tmp_path, FROM, **given)
    found = pytest.raises(SelfCheckError, match="as long as the longest row")
    with found if refused else contextlib.nullcontext():
        trainer.train()


def test_nothing_is_left_of_the_check(tmp_path):
    trainer = trainer_on(tmp_path, FROM)
    trainer.model.eval()
    trainer.run.check_engine()
    assert not trainer.model.training
