"""Give MkDocs the pages that stand beside the code, where they are, and what is made of the code.

- Each page (``*.md``) is a page of the site; what it links to and is no page becomes one, so that a
  link works here as in a repository's browser.
- Each command has a page, made of the parser that its ``--help`` prints.
- The reference has every public name, by :data:`REFERENCE`; a name that is missing there stops the
  build, and so does one that does not exist.
- Each notebook is a page with its outputs.
- ``<!-- figure: NAME -->`` on a page is where the site has the figure NAME of :data:`FIGURES`.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import html as markup
import importlib
import io
import json
import os
import posixpath
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# {title of a page: names below hf_dp}
REFERENCE = {
    "Trainers": """DPTrainer DPSeq2SeqTrainer trainer.sft.DPSFTTrainer trainer.dpo.DPDPOTrainer
        trainer.reward.DPRewardTrainer trainer.grpo.DPGRPOTrainer
        trainer.embeddings.DPSentenceTransformerTrainer""",
    "Arguments": """DPTrainingArguments DPSeq2SeqTrainingArguments trainer.sft.DPSFTConfig
        trainer.dpo.DPDPOConfig trainer.reward.DPRewardConfig trainer.grpo.DPGRPOConfig""",
    "What trains": """FrostConfig RgpConfig AdapterConfig TopBlocksConfig BitFitConfig HeadConfig
        ParamConfig PvalConfig RandomConfig tuners.selection.SelectionConfig
        tuners.selection.register""",
    "A loop of your own": """PrivateRun run.options.RunOptions batches.loader.BatchOptions
        mechanism_for mechanisms.base.Mechanism save_run publish shard streams.load""",
    "Plans": """PrivacyPlan DpSgdPlan NoisedLoss PrivateEncoderPlan FrozenPlan PublishedPlan
        plans.draws.Draw""",
    "Accounting": """accounting.epsilon accounting.calibrate_noise_multiplier
        accounting.calibrate_steps accounting.Epsilon Ledger accounting.LedgerEntry
        accounting.register_accountant accounting.register_event accounting.event_from_dict
        accounting.Event accounting.PoissonSampledGaussian
        accounting.TruncatedPoissonSampledGaussian accounting.RandomAllocationGaussian
        accounting.Gaussian accounting.UserRowsGaussian accounting.SumAndRows
        accounting.BestOfRandomRuns accounting.RecordRelease accounting.SampledRecordRelease
        accounting.PublishedForwardNoise""",
    "Clipping": """ClippingEngine clipping.register_rule clipping.per_example_gradients
        clipping.self_check clipping.OuterProducts clipping.Lookups""",
    "Statement and card": "PrivacyStatement cards.verify.verify",
    "Errors": "errors",
}

# {name: (what its records are made by, arguments of `hf-dp figure`, what one sees)}
FIGURES = {
    "methods": (
        "recipes/sst2/half_epoch/results.csv",
        "--x target_epsilon --y accuracy --by method",
        "Accuracy on the development sentences. One run each: differences below 3 points are none.",
    ),
    "batches": (
        "hf-dp plan --num_examples 67349 --num_train_epochs 3 "
        "--sweep expected_batch_size=64..4096 target_epsilon=1,8",
        "--x expected_batch_size --y effective_noise_multiplier",
        "What the same three passes over the rows cost in noise on a step's mean gradient, which "
        "falls nearly as fast as the batch grows. Both axes are logarithmic.",
    ),
    "accountants": (
        "hf-dp plan --num_examples 67349 --expected_batch_size 1024 --num_train_epochs 3 "
        "--sweep noise_multiplier=0.6,0.7,0.8,1,1.2,1.4 --cross_check",
        "--x noise_multiplier --y results.epsilon --by results.accountant",
        "Epsilon of one run, by accountant. PLD and PRV are the same to the eye. GDP-CLT is below "
        "what is proven, and the more so the less noise there is.",
    ),
}


# -- pages beside the code ---------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every page, where it is."""
    for path in sorted(pages()):
        files.append(_where_it_is(path, config))
    for place, text in {**command_pages(), **reference_pages()}.items():
        files.append(File.generated(config, place, content=text))
    linked = {target for path in pages() for _, target, _ in links(path)}
    for target in sorted(linked):
        if target.suffix in (".png", ".svg", ".jpg"):
            if target.is_file():
                files.append(_where_it_is(target, config))
        elif target.suffix not in (".md", ".ipynb") and target.is_file():
            files.append(File.generated(config, _source_page(target), content=_as_code(target)))
    for path in sorted(ROOT.glob("recipes/notebooks/*.ipynb")):
        files.append(_where_it_is(path, config))
        files.append(File.generated(config, _source_page(path), content=_as_markdown(path)))
    return files


def pages() -> list[Path]:
    """Return the pages of the project: all but the templates of cards."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob(".github/*.md")]
    for top in ("hf_dp", "recipes", "model_cards"):
        found += ROOT.glob(f"{top}/**/*.md")
    return [path for path in found if path.parent != ROOT / "hf_dp" / "cards"]


def _where_it_is(path: Path, config: MkDocsConfig) -> File:
    place = path.relative_to(ROOT).as_posix()
    file = File.generated(config, place, abs_src_path=str(path))
    if place.startswith("."):  # which servers of sites leave out
        file.dest_uri = file.dest_uri.removeprefix(".github/")
    return file


_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def links(path: Path) -> Iterator[tuple[re.Match[str], Path, str]]:
    """Yield the relative links of a page, with their targets and anchors."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for link in _LINK.finditer(text):
        yield link, (path.parent / link[2]).resolve(), link[3] or ""


def _source_page(target: Path) -> str:
    place = target.relative_to(ROOT)
    if place.suffix == ".ipynb":
        return place.with_suffix(".md").as_posix()
    return f"source/{place.as_posix()}.md"


_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def _as_code(path: Path) -> str:
    """Return a page that shows a file."""
    language = _LANGUAGES.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    title = path.relative_to(ROOT).as_posix()
    return f"---\nsearch: {{exclude: true}}\n---\n# `{title}`\n\n````{language}\n{text}````\n"


def _as_markdown(notebook: Path) -> str:
    """Return a page that shows a notebook and what its cells printed and drew."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts += [f"````python\n{source}\n````" if is_code else source]
        parts += map(_output, cell.get("outputs", ()))
    parts.append(f'<a href="../{notebook.name}" download>Download this notebook</a>')
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data") or {"text/plain": output.get("text", "")}
    text = {kind: "".join(value) for kind, value in data.items()}
    if "image/png" in text:
        source = f"data:image/png;base64,{text['image/png'].strip()}"
        return f'<img alt="the figure that this cell draws" src="{source}">'
    if "text/html" in text:
        return f'<div class="output">{text["text/html"]}</div>'
    plain = text["text/plain"].strip()  # nothing, where a bar has gone
    return plain and f"````{{.text .output .no-copy}}\n{plain}\n````"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files that are no pages to the pages that show them."""
    here = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[2]))
        if (ROOT / target).is_dir():
            target = posixpath.join(target, "README.md")
        elif files.get_file_from_path(shown := _source_page(ROOT / target)):
            target = shown
        else:
            return link[0]
        return f"{link[1]}{posixpath.relpath(target, here or '.')}{link[3] or ''})"

    # Fences stay as they are.
    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.S | re.M)
    return "".join(part if i % 2 else _LINK.sub(led, part) for i, part in enumerate(parts))


# -- the command line --------------------------------------------------------


def command_pages() -> dict[str, str]:
    """Return a page for each command, by its place."""
    from hf_dp.cli.main import COMMANDS

    rows = "\n".join(f"| [`hf-dp {name}`]({name}.md) | {text} |" for name, text in COMMANDS.items())
    found = {"cli/README.md": f"# Command line\n\n| Command | What it does |\n|---|---|\n{rows}\n"}
    for name in COMMANDS:
        found[f"cli/{name}.md"] = f"# hf-dp {name}\n\n" + _described(parser_of(name), 2)
    return found


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser whose help ``hf-dp COMMAND --help`` prints."""
    from hf_dp.cli.main import main

    found: list[argparse.ArgumentParser] = []
    printing = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = lambda self, file=None: found.append(self)  # type: ignore
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main([command, "--help"])
    finally:
        argparse.ArgumentParser.print_help = printing  # type: ignore[method-assign]
    if not found:
        raise PluginError(f"`hf-dp {command} --help` prints no help of a parser.")
    return found[0]


def _described(parser: argparse.ArgumentParser, depth: int) -> str:
    parts = [f"```text\n{parser.format_usage().strip()}\n```", _prose(parser.description)]
    below: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                below = dict(action.choices)
            elif action.help is not argparse.SUPPRESS and action.dest != "help":
                rows.append(f"| {_option(action)} | {_cell(_help(action, parser))} |")
        if rows:
            title = (group.title or "").capitalize()
            head = (
                f"{'#' * depth} {title}\n\n{group.description or ''}\n\n| Argument | |\n|---|---|"
            )
            parts.append("\n".join([head, *rows]))
    parts.append(_prose(parser.epilog))
    for name, child in below.items():
        parts.append(f"{'#' * depth} {child.prog or name}")
        parts.append(_described(child, depth + 1))
    return "\n\n".join(part for part in parts if part) + "\n"


def _option(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or action.dest
    shown = action.metavar or ("" if action.nargs == 0 or not action.option_strings else "VALUE")
    return f"`{names} {shown if isinstance(shown, str) else ' '.join(shown)}".strip() + "`"


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _prose(text: str | None) -> str:
    """Return text of a help; lines that are indented, or begin an example, are code."""
    blocks = re.split(r"\n\n+", (text or "").strip("\n"))
    return "\n\n".join(
        f"```text\n{block}\n```" if re.search(r"^ ", block, flags=re.M) else _escaped(block)
        for block in blocks
        if block
    )


def _escaped(text: str) -> str:
    """Return text as Markdown that shows it; what is in backticks is code there, too."""
    return "".join(
        part if i % 2 else re.sub(r"([<>*_|\[\]])", r"\\\1", part)
        for i, part in enumerate(re.split(r"(`[^`]*`)", text))
    )


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))


# -- the reference -----------------------------------------------------------


def reference_pages() -> dict[str, str]:
    """Return the pages of :data:`REFERENCE`, by their places; each public name must be there."""
    import hf_dp

    named = {name for names in REFERENCE.values() for name in names.split()}
    if missing := set(hf_dp.__all__) - named - {"__version__"}:
        raise PluginError(f"REFERENCE in {__file__} does not have {sorted(missing)}.")
    return {
        _reference_place(title): f"# {title}\n\n" + "\n".join(map(_directive, names.split()))
        for title, names in REFERENCE.items()
    }


def _reference_place(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '_')}.md"


def _directive(name: str) -> str:
    """Return the directive of a name; arguments and options of a dataclass follow as a table."""
    module, _, attribute = f"hf_dp.{name}".rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute, None)
        if found is None:
            found = importlib.import_module(f"hf_dp.{name}")
    except ImportError as problem:
        raise PluginError(f"REFERENCE has hf_dp.{name}: {problem}") from problem
    fields = _helped_fields(found)
    # What the table has.
    options = "    options: {members: false, show_signature: false, separate_signature: false}\n"
    options = options if fields else ""
    table = _table_of(fields)
    return f"::: hf_dp.{name}\n{options}\n{table}\n"


def _helped_fields(found: Any) -> list["dataclasses.Field[Any]"]:
    """Return the fields with a help that hf_dp declares."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return []
    from hf_dp import DPTrainingArguments

    above = DPTrainingArguments if found is not DPTrainingArguments else object
    ours = [
        name
        for cls in found.__mro__
        if cls.__module__.startswith("hf_dp") and not issubclass(above, cls)
        for name in cls.__dict__.get("__annotations__", {})
    ]
    helped = {each.name: each for each in dataclasses.fields(found) if "help" in each.metadata}
    return [helped[name] for name in dict.fromkeys(ours) if name in helped]


def _table_of(fields: list["dataclasses.Field[Any]"]) -> str:
    from hf_dp._dataclasses import default_of

    rows = []
    for field in fields:
        kind = getattr(field.type, "__name__", field.type)
        default = default_of(field)
        value = "" if default is dataclasses.MISSING else f" = {default!r}"
        rows.append(f"| `{field.name}`<br>`{kind}{value}` | {_cell(field.metadata['help'])} |")
    return "\n".join(["| Argument | |", "|---|---|", *rows]) if rows else ""


_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):<code>~?([\w.]+)</code>")
_HF = re.compile(r"\[<code>~?([\w.]+)</code>\]")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the names in docstrings that the reference has."""

    def linked(role: re.Match[str]) -> str:
        name = role[1]
        shown = name.rpartition(".")[2]
        return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'

    html = html.replace("<p>%s</p>", "")  # where fields are described, which are in a table
    html = _FIGURE.sub(lambda comment: figure(comment[1]), html)
    return _HF.sub(linked, _ROLE.sub(linked, html))


# -- figures -----------------------------------------------------------------

_FIGURE = re.compile(r"<!-- figure: (\w+) -->")


@functools.cache
def figure(name: str) -> str:
    """Return a figure of :data:`FIGURES` as SVG whose ink is the page's, and how it is made."""
    if name not in FIGURES:
        raise PluginError(f"A page asks for the figure {name!r}, which FIGURES does not have.")
    source, axes, caption = FIGURES[name]
    try:
        with tempfile.TemporaryDirectory() as folder:
            records, picture = Path(folder) / "records.json", Path(folder) / "figure.svg"
            records.write_text(_records(source), encoding="utf-8")
            _printed(["figure", str(records), *shlex.split(axes), "-o", str(picture)], name)
            drawn = picture.read_text(encoding="utf-8")
    except OSError as problem:
        raise PluginError(f"The figure {name!r} cannot be drawn: {problem}") from problem
    drawn = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.S)
    drawn = drawn.replace("#000000", "currentColor").replace("#ffffff", "none")
    made = f"{source} --json > made.json" if source.startswith("hf-dp ") else source
    made += f"; hf-dp figure made.json {axes} -o {name}.svg" if made != source else ""
    title = f"{markup.escape(caption)}<br><code>{markup.escape(made)}</code>"
    drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{markup.escape(caption)}" ', 1)
    return f"<figure data-search-exclude>{drawn}<figcaption>{title}</figcaption></figure>"


def _records(source: str) -> str:
    """Return the records that a command prints, or those of the runs in a file of results."""
    if source.startswith("hf-dp "):
        return _printed([*shlex.split(source)[1:], "--json"], source)
    with open(ROOT / source, encoding="utf-8") as file:
        rows = [{**row, "method": Path(row["recipe"]).stem} for row in csv.DictReader(file)]
    numbers = ("target_epsilon", "accuracy")
    return json.dumps(
        [
            {"method": row["method"], **{name: float(row[name]) for name in numbers}}
            for row in rows
            # neither an ablation nor DP-FP, which has one epsilon
            if row["run"] == f"{row['method']}_eps{row['target_epsilon']}"
            and not row["method"].startswith("dp_fp")
        ]
    )


def _printed(words: list[str], what: str) -> str:
    from hf_dp.cli.main import main

    out, problems = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problems):
        if main(words):
            raise PluginError(f"{what!r} cannot be drawn: {problems.getvalue().strip()}")
    return out.getvalue()


# -- navigation --------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the sections that are made of the code."""
    from hf_dp.cli.main import COMMANDS

    made = {
        "Command line": [
            {"All commands": "cli/README.md"},
            *({name: f"cli/{name}.md"} for name in COMMANDS),
        ],
        "Reference": [{title: _reference_place(title)} for title in REFERENCE],
    }
    sections = [section for each in config.nav for section in each.items()]
    config.nav = [{title: made.get(title, below)} for title, below in sections]
    os.environ["HF_HUB_OFFLINE"] = "1"
    return config
