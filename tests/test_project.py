"""The project as a newcomer meets it: installation, README, first errors."""

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest
from datasets import Dataset
from pages import PAGES, README, ROOT, blocks, calls_in_prose, commands, languages
from tiny_text import fresh_gpt2, gpt2, saved
from transformers import GPT2LMHeadModel
from warm import OFFLINE, run_program


def test_public_names_resolve_and_a_wrong_one_lists_them():
    import hf_dp

    for name in hf_dp.__all__:
        assert getattr(hf_dp, name) is not None
    with pytest.raises(AttributeError, match="DPTrainer"):
        _ = hf_dp.DPTrainr


# -- pages: README.md, those beside what they describe, and CONTRIBUTING.md ---


def run_programs(page: str, folder: Path, *changes: tuple[str, str]) -> str:
    """Run a page's programs in order, in one fresh process and this folder; return what they
    print. Args: changes: texts that must be there, and what to put in their place."""
    program = "\n\n".join(blocks(page, "python"))
    for text, other in changes:
        assert text in program
        program = program.replace(text, other)
    done = run_program(program, folder, env=OFFLINE)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


# The same program on a fortieth of the rows: seconds in place of a minute.
FEWER_ROWS = (
    ("num_train=8000", "num_train=200"),
    ("expected_batch_size=256", "expected_batch_size=32"),
)


@pytest.mark.parametrize(
    "changes",
    [FEWER_ROWS, pytest.param((), marks=pytest.mark.slow)],
    ids=["fewer rows", "as printed"],
)
def test_readme_quick_start_is_short_and_runs(tmp_path, changes):
    quick_start, *_ = blocks("README.md", "python")
    assert len(quick_start.splitlines()) <= 25
    printed = run_programs("README.md", tmp_path, *changes)
    assert "differentially private" in printed
    assert re.search(r"^accuracy 0\.\d+ epsilon 8\.0$", printed, flags=re.M), printed


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "+from hf_dp" in "".join(blocks(page, "diff"))]
)
def test_the_diffs_of_a_page_end_in_calls_that_exist(page):
    for diff in blocks(page, "diff"):
        after = ast.parse("".join(f"{x[1:]}\n" for x in diff.splitlines() if x[:1] != "-"))
        ours = {
            alias.name: named(f"{node.module}.{alias.name}")
            for node in ast.walk(after)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("hf_dp")
            for alias in node.names
        }
        ours |= {"PrivacyPlan.solve": named("hf_dp.PrivacyPlan.solve")}
        calls = [node for node in ast.walk(after) if isinstance(node, ast.Call)]
        named_calls = [
            (ours[name], call) for call in calls if (name := ast.unparse(call.func)) in ours
        ]
        assert named_calls
        for called, call in named_calls:
            given = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(called).bind_partial(*[None] * len(call.args), **given)


# What a name in prose stands for; functions of the reader's own, and formulas.
STANDS_FOR = {
    "trainer": "hf_dp.trainer.trainer.DPTrainer", "mechanism": "hf_dp.mechanisms.base.Mechanism",
    "run": "hf_dp.run.private_run.PrivateRun", "release": "hf_dp.run.gate.Release",
    "model": "transformers.PreTrainedModel", "dist": "torch.distributed",
}  # fmt: skip
SEARCHED = (
    "hf_dp", "hf_dp.clipping", "hf_dp.run.options", "hf_dp.batches.loader", "datasets",
    "transformers", "builtins", STANDS_FOR["trainer"], STANDS_FOR["mechanism"],
)  # fmt: skip
THE_READERS = {
    "f", "keep", "gradients", "epsilon", "check_metrics", "sqrt", "F", "sum_j", "cast_column",
}  # fmt: skip


def named(path: str) -> object:
    """The object of a dotted path, module by module and then by attributes."""
    head, *rest = path.split(".")
    found: object = importlib.import_module(head)
    for part in rest:
        head = f"{head}.{part}"
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(head)
        found = getattr(found, part)
    return found


def refused_call(call: ast.Call) -> str | None:
    """Why a call cannot be as it is printed, or None."""
    head, _, rest = (name := ast.unparse(call.func)).partition(".")
    if not rest:
        if name in THE_READERS:
            return None
        owner = next((path for path in SEARCHED if hasattr(named(path), name)), None)
        if owner is None:
            return f"{name} is nowhere in {SEARCHED}"
        path = f"{owner}.{name}"
    else:
        path = f"{STANDS_FOR.get(head, head)}.{rest}"
    try:
        called = named(path)
    except (AttributeError, ImportError) as problem:
        return str(problem)
    of_an_object = [None] * (path.split(".")[-2][0].isupper() and not isinstance(called, type))
    try:
        inspect.signature(called).bind_partial(
            *of_an_object, *call.args, **{word.arg: None for word in call.keywords if word.arg}
        )
    except TypeError as problem:
        return f"{name}: {problem}"
    except ValueError:  # a builtin that has no signature
        return None
    return None


@pytest.mark.parametrize("page", PAGES)
def test_code_in_prose_can_be_called_and_code_is_in_blocks_with_a_language(page):
    text = PAGES[page].read_text()
    refused = {ast.unparse(call): refused_call(call) for call in calls_in_prose(text)}
    assert {call: why for call, why in refused.items() if why} == {}
    assert set(languages(text)) <= {"python", "bash", "yaml", "diff", "text", "csv", "json"}


def test_planted_calls_in_prose_that_cannot_be_made_are_seen():
    for planted in (
        'write the card with `hf_dp.cards.card.render_card(statement, model_name="mine")`.',
        "call `trainer.save_everything()`",
        "with `options=RunOptions(batches=BatchOptions(size=3))`",
        "`mechanism.find_physical_batch(optimizer, 3)`",
    ):
        assert any(map(refused_call, calls_in_prose(planted))), planted
    assert languages("So\n\n    run.train()\n\nand\n```\nrun.train()\n```\n") == ["", ""]


# Java starts for each metric, and other tests need it, too; README.md has nearly the same program.
SLOW = ("hf_dp/tasks/generation/README.md", "recipes/coming_from/opacus.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW))
        for page in PAGES
        if page != "README.md" and blocks(page, "python")
    ],
)
def test_the_programs_of_a_page_run(page, tmp_path):
    BEFORE.get(page, lambda folder: None)(tmp_path)
    run_programs(page, tmp_path)
    AFTER.get(page, lambda folder: None)(tmp_path)


def trained_gpt2_and_dialogs(folder: Path) -> None:
    dialogs = [{"history": ["hi there"], "candidates": ["no", "i like to ski"]}] * 3
    Dataset.from_list(dialogs).to_parquet(str(folder / "DEV.parquet"))
    model = gpt2()
    model.generation_config.max_new_tokens = 4
    saved(folder / "outputs" / "e2e" / "gpt2_full_eps8", model)


def a_decoder_and_tickets(folder: Path) -> None:
    names = ["billing", "delivery", "technical"]
    config, tokenizer = fresh_gpt2(
        [f" {name}" for name in names] * 9, vocabulary=300, layers=2, width=16, heads=2
    )
    tokenizer.save_pretrained(folder / "DECODER")
    GPT2LMHeadModel(config).save_pretrained(folder / "DECODER")
    for name, word in (("TRAIN", "my"), ("DEV", "another")):
        rows = [{"text": f"{word} {i}", "label": names[i % 3]} for i in range(96)]
        Dataset.from_list(rows).to_csv(str(folder / f"{name}.csv"))


def the_card_of_tickets_says_the_words(folder: Path) -> None:
    card = (folder / "outputs" / "tickets" / "README.md").read_text()
    assert "logits[0, -1]" in card and "billing" in card


def the_saved_run_is_verified(folder: Path) -> None:
    """With all that DPTrainer saves."""
    from hf_dp.cards.verify import verify

    run = folder / "outputs" / "loop"
    assert verify(run).outcome == "ok", verify(run)
    assert {path.name for path in run.iterdir()} >= {"model.safetensors", "README.md"}


# What a program needs that a recipe would have made, and what it must have done.
BEFORE = {
    "recipes/e2e/README.md": trained_gpt2_and_dialogs,
    "recipes/glue/README.md": a_decoder_and_tickets,
}
AFTER = {
    "hf_dp/run/README.md": the_saved_run_is_verified,
    "recipes/glue/README.md": the_card_of_tickets_says_the_words,
}


def test_contributing_walks_all_that_can_be_added():
    programs = blocks(".github/CONTRIBUTING.md", "python")
    adds = (
        "@register_rule(", "@register_draw", "(SelectionConfig):", "register_accountant(",
        "TASKS[", "@register\nclass",
    )  # fmt: skip
    assert all(each in program for program, each in zip(programs, adds, strict=True))


def test_the_account_commands_of_the_sst2_page_run(capsys):
    from hf_dp.cli.main import main

    account = [
        words[1:]
        for words in commands("recipes/sst2/README.md")
        if words[:2] == ["hf-dp", "account"] and words[2] in ("epsilon", "noise")
    ]
    assert len(account) == 2
    for words in account:
        assert main(words) == 0
    assert "2.41" in capsys.readouterr().out


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_of_a_page_leads_somewhere(page):
    path = PAGES[page]
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / ".github" / "site" / "mkdocs.yml").read_text()
    assert set(PAGES) - set(re.findall(r"(?:: |- )(\S+\.md)$", navigation, flags=re.M)) == set()


def test_no_file_names_a_machine():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    suspicious = re.compile(r"/work/|/root/|/home/\w+/")
    here = Path(__file__).name
    for name in tracked:
        if name.endswith(
            (".py", ".md", ".toml", ".yaml", ".txt", "Makefile")
        ) and not name.endswith(here):
            assert not suspicious.search((ROOT / name).read_text(encoding="utf-8")), name
