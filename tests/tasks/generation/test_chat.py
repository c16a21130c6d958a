"""Conversations: labels on the assistant's turns alone, whatever the template can tell."""

import copy

import pytest
import tiny_text
import torch
from models import llama

from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL, per_example_loss
from hf_dp.tasks.generation.encoding import ChatEncoding, has_markers

TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Which food?"},
    {"role": "assistant", "content": "Thai food."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "The riverside."},
]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>\n{% endgeneration %}{% else %}{{ m.content }}</s>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Shortens every turn but the last, as templates do that drop earlier reasoning.
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content[:3] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def encoding(template: str, max_length: int = 200) -> ChatEncoding:
    words = copy.deepcopy(tiny_text.tokenizer())
    words.chat_template = template
    return ChatEncoding(words, max_length)


def labeled(row: dict, words) -> str:
    return words.decode([token for token in row["labels"] if token != IGNORED_LABEL])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_labels_are_the_assistants_words_and_their_end(template):
    chat = encoding(template)
    assert chat.template == (MARKED if template == MARKED else None)  # how it is known
    row = chat.example(TURNS, 0)
    assert labeled(row, chat.tokenizer) == "Thai food.</s>\nThe riverside.</s>\n"
    assert chat.tokenizer.decode(row["input_ids"]) == "".join(
        f"<{turn['role']}>{turn['content']}</s>\n" for turn in TURNS
    )


def test_the_loss_of_the_users_turns_is_zero():
    """Against the sum over the assistant's tokens alone, found by the text of the template."""
    chat = encoding(PLAIN)
    words = chat.tokenizer
    row = chat.example(TURNS, 0)
    model = llama(vocab_size=len(words), max_position_embeddings=200)
    batch = {name: torch.tensor([value]) for name, value in row.items()}
    logits = model(batch["input_ids"]).logits[0].detach()
    text = words.decode(row["input_ids"])
    told = ("Thai food.</s>\n", "The riverside.</s>\n")
    spans = [range(text.index(t), text.index(t) + len(t)) for t in told]
    lengths = [len(words.decode([token])) for token in row["input_ids"]]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    # The places of the assistant's tokens, from the characters of the text.
    own = [place for place, start in enumerate(starts) if any(start in span for span in spans)]
    by_hand = -torch.stack([logits[p - 1].log_softmax(-1)[row["input_ids"][p]] for p in own]).mean()
    torch.testing.assert_close(per_example_loss(model, batch)[0], by_hand, rtol=1e-12, atol=0)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(DataError, match=r"rewrites earlier turns \(seen in row 4, turn 2\)"):
        encoding(REWRITING).example(TURNS, 4)


def test_trl_knows_versions_of_templates_that_mark_the_assistants_turns():
    utils = pytest.importorskip("trl.chat_template_utils")
    chat = encoding(utils.qwen3_chat_template)  # drops earlier reasoning, and marks nothing
    assert not has_markers(utils.qwen3_chat_template)
    row = chat.example(TURNS, 0)
    assert has_markers(chat.template)
    text = labeled(row, chat.tokenizer)
    assert "Thai food." in text and "riverside" in text
    assert "Which" not in text and "Where" not in text and "short" not in text


def test_a_question_ends_where_the_assistant_begins():
    chat = encoding(PLAIN)
    prompt = chat.prompt(TURNS, 0, room=1)
    assert chat.tokenizer.decode(prompt).endswith("Where?</s>\n<assistant>")
    assert chat.reference(TURNS, 0) == "The riverside."


UNFIT = [
    ("text", "list of turns"),
    ([], "no turn with the role"),
    ([{"role": "user"}], "list of turns"),
    ([{"role": "user", "content": None}], "list of turns"),
    ([{"role": "user", "content": "x"}], "no turn with the role 'assistant'"),
    ([{"role": "assistant", "content": "x"}], "begins with the assistant's turn"),
]


@pytest.mark.parametrize(("turns", "message"), UNFIT)
def test_a_conversation_that_does_not_fit_is_named(turns, message):
    with pytest.raises(DataError, match=f"Row 9.*{message}"):
        encoding(PLAIN).example(turns, 9)


def test_a_conversation_is_cut_and_needs_a_token_of_the_assistants():
    assert len(encoding(PLAIN, 70).example(TURNS, 0)["input_ids"]) == 70
    with pytest.raises(DataError, match="Row 2 has no token of the assistant in its first 8"):
        encoding(PLAIN, 8).example(TURNS, 2)
    with pytest.raises(DataError, match=r"Row 2 has .* before the assistant's last turn"):
        encoding(PLAIN, 8).prompt(TURNS, 2, room=1)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match="has none"):
        encoding("")


def test_a_template_that_refuses_names_the_row():
    with pytest.raises(DataError, match="refuses row 3: only users"):
        encoding("{{ raise_exception('only users') }}").example(TURNS, 3)
