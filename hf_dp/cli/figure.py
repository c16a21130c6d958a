"""``hf-dp figure``: draw what sweep, plan and partitions --chosen print with ``--json``.

A record is one run, one plan or one selection. Its blocks (``settings``, ``metrics``) become dotted
names, of which the last part is enough where it is unique. Where a list in it (``logs``,
``results``, ``parts``) holds a name that is asked for, each item becomes a record of its own.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from hf_dp import _validate
from hf_dp.cli.cells import in_words
from hf_dp.cli.options import Parser
from hf_dp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXAMPLES = """examples:
  hf-dp sweep --config recipe.yaml --grid target_epsilon=2,8 --output-dir outputs/s --json > s.json
  hf-dp figure s.json --x target_epsilon --y accuracy -o curve.png
  hf-dp figure s.json --x expected_batch_size --y learning_rate --color bleu -o heat_map.png
  hf-dp figure s.json --x step --y logs.signal_to_noise -o log.png
  hf-dp figure chosen.json --x kind --y block --color parts.magnitude -o chosen.png

A point is the mean over the seeds, with bars (or a band) from the smallest to the largest value.
"""
Record = Mapping[str, Any]
Records = Sequence[Record]
Names = Sequence[str]
Place = float | str  # on an axis
Cells = dict[tuple[Place, Place], float | None]  # of a heat map
T = TypeVar("T", bound=Hashable)
LABEL = "label"
_SCORES = ("metrics", "zero_shot")  # seeds differ in them, on whichever axis they stand
_LINEAR = (*_SCORES, "logs")  # never on a logarithmic axis
_MANY = 30  # points of a curve, of which the spread is a band


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "hf-dp figure",
        description="Draw records that sweep, plan or partitions printed with --json: curves with "
        "--x and --y, a heat map with --x, --y and --color.",
        epilog=EXAMPLES,
    )
    option = parser.option
    option("file", "the JSON", "FILE")
    option("--x", "the horizontal axis", "NAME", required=True)
    option("--y", "the vertical axis", "NAME", required=True)
    option("--color", "the values of a heat map", "NAME")
    each = "a curve or a heat map for each combination of these (default: of all settings that "
    option("--by", f"{each}vary and are not on an axis)", "NAME", nargs="*")
    points = "points from elsewhere, such as a paper's; its columns are the last parts of the axes'"
    option("--beside", f"{points} names, and `label` for curves", "CSV")
    parser.add_argument("-o", "--output", required=True, metavar="PICTURE", help="PNG, PDF or SVG")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the picture and print its path; return 2 for records that it cannot show."""
    args = build_parser().parse_args(list(argv))
    if Path(args.output).suffix.lower() not in (kinds := [".png", ".pdf", ".svg"]):
        raise _validate.invalid("output", args.output, f"to end in one of {kinds}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("Figures need matplotlib. Run `pip install hf-dp[plot]`.")
    named = [name for name in (args.x, args.y, args.color) if name is not None]
    records = read_records(args.file, [*named, *(args.by or [])])
    axes = [find(records, name) for name in named]
    by = _varied(records, axes) if args.by is None else [find(records, each) for each in args.by]
    numbers = axes[-1:] if args.color else axes
    shown = [one for one in records if all(_is_number(one.get(key)) for key in numbers)]
    if not shown:
        raise ConfigError(f"No record of {args.file!r} has a number for each of {numbers}.")
    if len(shown) < len(records):
        lacking = f"{len(records) - len(shown)} of {len(records)} records"
        print(f"{lacking} have no number for {' or '.join(numbers)}", file=sys.stderr)
    beside: Records = ()
    title = ""
    if args.beside is not None:
        beside = read_beside(args.beside, not args.color, [_short(key) for key in axes])
        title = Path(args.beside).stem
    draw = heat_maps if args.color else curves
    # a heat map has a blank place for what has no number
    figure = draw(records if args.color else shown, axes, by, beside, title)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)
    print(args.output)
    return 0


# -- records ---


def read_records(path: str, names: Names) -> list[Record]:
    """Return the records of a file, flat."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"Cannot read records from {path!r}: {problem}") from problem
    rows = found.get("rows", [found]) if isinstance(found, dict) else found
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"Expected {path!r} to hold a list of records, which sweep, plan and partitions "
            "--chosen print with --json."
        )
    return [record for row in rows for record in _flat(row, names)]


def _flat(row: Record, names: Names) -> Iterator[Record]:
    plain: dict[str, object] = {}
    asked = []
    for key, value in row.items():
        if isinstance(value, dict):
            plain |= {f"{key}.{name}": one for name, one in value.items()}
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            items = [{f"{key}.{name}": one for name, one in item.items()} for item in value]
            if any(_is_called(full, name) for name in names for item in items for full in item):
                asked.append(items)
        else:
            plain[key] = value
    for each in itertools.product(*asked):
        yield plain | {key: value for item in each for key, value in item.items()}


def _is_called(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")


def find(records: Records, name: str) -> str:
    """Return the full name."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    found = [name] if name in keys else [key for key in keys if _is_called(key, name)]
    if not found:
        raise ConfigError(f"Expected each name to be one of {keys}, got {name!r}.")
    if any(record.get(found[0]) != record.get(key) for key in found for record in records):
        raise ConfigError(f"{name!r} is ambiguous: {found} differ. Write one of these.")
    return found[0]


def _varied(records: Records, axes: Names) -> list[str]:
    settings = dict.fromkeys(k for record in records for k in record if k.startswith("settings."))
    return [
        key
        for key in settings
        if key not in axes and len({json.dumps(record.get(key)) for record in records}) > 1
    ]


def _short(key: str) -> str:
    """Return a name without its block."""
    return key.partition(".")[2] or key


def _label(record: Record, by: Names) -> str:
    """Return the values in words; a word says by itself what it is, a number does not."""
    said = []
    for key in by:
        if key in record:
            value = record[key]
            alone = isinstance(value, (str, dict)) and value
            said.append(in_words(value) if alone else f"{_short(key)}={in_words(value)}")
    return " ".join(said)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_beside(path: str, labelled: bool, numbers: Names) -> Records:
    """Return the rows of a CSV file with these columns of numbers, and `label` if ``labelled``."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        found: Records = [{**row, **{n: float(row[n]) for n in numbers}} for row in rows]
        finite = all(math.isfinite(row[name]) for row in found for name in numbers)
        if not rows or not finite or (labelled and LABEL not in rows[0]):
            raise ValueError(f"{len(rows)} rows of {list(rows[0]) if rows else 'nothing'}")
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as problem:
        raise ConfigError(
            f"`--beside` cannot read points from {path!r}: {problem!r}. Expected finite numbers of "
            f"{list(numbers)}, which this figure shows"
            f"{f', and the column `{LABEL}`' if labelled else ''}."
        ) from problem
    return found


# -- figures ---


def _groups(
    records: Records, by: Names, place_of: Callable[[Record], T]
) -> dict[str, dict[T, list[Record]]]:
    """Return the records of each label by their place, where they differ in their seeds alone."""
    found: dict[str, dict[T, list[Record]]] = {}
    for one in records:
        label = _label(one, by)
        seeds = found.setdefault(label, {}).setdefault(place_of(one), [])
        for other in seeds:
            if other.get("seed") == one.get("seed"):
                differ = [key for key in one if one[key] != other.get(key)]
                raise ConfigError(
                    f"Two records of one seed are one point{f' of {label!r}' if label else ''}. "
                    f"Name in `--by` what distinguishes them; they differ in {differ}."
                )
        seeds.append(one)
    return found


def curves(records: Records, axes: Names, by: Names, beside: Records, title: str) -> Figure:
    """Draw a curve for each label; a label has the same color in both sources."""
    x, y = axes

    def place_of(one: Record) -> str:
        settings = [value for key, value in one.items() if key.startswith("settings.")]
        return json.dumps([settings, None if x.startswith(_SCORES) else one[x]])

    ours = _groups(records, by, place_of)
    theirs = _groups(beside, [LABEL], lambda one: one[_short(x)])
    order = list(dict.fromkeys([*ours, *theirs]))
    figure, (place,) = _panels(1, width=6.5, height=4.2)
    seen: tuple[set[float], set[float]] = set(), set()
    for source, keys in ((ours, (x, y)), (theirs, (_short(x), _short(y)))):
        for label, groups in source.items():
            points = [
                tuple([one[key] for one in seeds] for key in keys) for seeds in groups.values()
            ]
            points.sort(key=lambda point: statistics.mean(point[0]))
            xs, ys = ([point[axis] for point in points] for axis in (0, 1))
            seen[0].update(*xs)
            seen[1].update(*ys)
            at, high = ([statistics.mean(each) for each in values] for values in (xs, ys))
            color, said = f"C{order.index(label)}", label or _short(y)
            if source is theirs:
                said = f"{title}: {label}"
                place.plot(at, high, "o--", color=color, label=said, markerfacecolor="white")
            elif len(xs) > _MANY:
                place.plot(at, high, color=color, label=said)
                edges = [min(each) for each in ys], [max(each) for each in ys]
                place.fill_between(at, *edges, color=color, alpha=0.2, linewidth=0)
            else:
                across = _spread(xs) if x.startswith(_SCORES) else None
                place.errorbar(
                    at, high, _spread(ys), across, marker="o", capsize=3, color=color, label=said
                )
    for axis, key, values in zip("xy", axes, seen, strict=True):
        place.set(**{f"{axis}label": _short(key)})
        if not key.startswith(_LINEAR) and _far_apart(values):
            marked = sorted(values)[:: len(values) // 9 + 1]
            place.set(**{f"{axis}scale": "log"})
            place.set(**{f"{axis}ticks": marked, f"{axis}ticklabels": [f"{v:.5g}" for v in marked]})
            hidden = {"which": "minor", "labelleft": False, "labelbottom": False}
            getattr(place, f"{axis}axis").set_tick_params(**hidden)
    if len(ours) + len(theirs) > 1:
        place.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _far_apart(values: set[float]) -> bool:
    return min(values) > 0 and max(values) >= 8 * min(values)


def _spread(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return how far the smallest and the largest of each are from their mean."""
    return [
        [statistics.mean(each) - min(each) for each in values],
        [max(each) - statistics.mean(each) for each in values],
    ]


def heat_maps(records: Records, axes: Names, by: Names, beside: Records, title: str) -> Figure:
    """Draw a heat map for each label, with the values of the other source in parentheses."""
    from matplotlib.colors import LogNorm, Normalize

    maps = _means(records, axes, by)
    x, y, color = map(_short, axes)
    others = _means(beside, [x, y, color], []).get("", {})
    every = [place for found in (*maps.values(), others) for place in found]
    columns, rows = (_in_order([place[axis] for place in every]) for axis in (0, 1))
    values = {value for found in maps.values() for value in found.values() if value is not None}
    is_log = not axes[-1].startswith(_LINEAR) and _far_apart(values)
    norm = (LogNorm if is_log else Normalize)(min(values), max(values))
    figure, places = _panels(len(maps), len(columns) + 2.5, 0.6 * len(rows) + 1.5)
    for place, (label, found) in zip(places, maps.items(), strict=True):
        shown = [[found.get((column, row)) for column in columns] for row in rows]
        filled = [[math.nan if value is None else value for value in line] for line in shown]
        image = place.imshow(filled, aspect="auto", cmap="viridis", norm=norm)
        for (j, column), (i, row) in itertools.product(enumerate(columns), enumerate(rows)):
            ours, theirs = shown[i][j], others.get((column, row))
            said = [] if ours is None else [f"{ours:.4g}"]
            said += [] if theirs is None else [f"({theirs:.4g})"]
            # viridis is dark below its middle; a cell without a value of ours is white
            shade = "white" if ours is not None and norm(ours) < 0.5 else "black"
            place.text(j, i, "\n".join(said), ha="center", va="center", fontsize=8, color=shade)
        place.set_yticks(range(len(rows)), [_tick(row) for row in rows])
        place.set_xticks(range(len(columns)), [_tick(column) for column in columns])
        place.tick_params(axis="x", labelrotation=90 * any(isinstance(v, str) for v in columns))
        words = [label, f"in parentheses: {title}" if title else ""]
        place.set(ylabel=y, xlabel=x)
        place.set_title("\n".join(filter(None, words)), fontsize=9)
        figure.colorbar(image, label=color)
    return figure


def _means(records: Records, axes: Names, by: Names) -> dict[str, Cells]:
    """Return the mean of each cell of each heat map, None for one without a number."""
    x, y, color = axes

    def place_of(one: Record) -> tuple[Place, Place]:
        return _place(one.get(x)), _place(one.get(y))

    def mean(seeds: Records) -> float | None:
        values = [one[color] for one in seeds if _is_number(one.get(color))]
        return statistics.mean(values) if values else None

    found = _groups(records, by, place_of)
    return {
        label: {place: mean(seeds) for place, seeds in cells.items()}
        for label, cells in found.items()
    }


def _in_order(values: Sequence[Place]) -> list[Place]:
    """Return each once: numbers rising, words in their order."""
    found = list(dict.fromkeys(values))
    return sorted(found) if all(_is_number(value) for value in found) else found


def _place(value: object) -> Place:
    return value if _is_number(value) else in_words(value)


def _tick(value: Place) -> str:
    return (value or "-") if isinstance(value, str) else f"{value:g}"


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure and its ``count`` axes side by side, without upper and right edges."""
    from matplotlib.figure import Figure  # not pyplot: no display is touched

    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes
