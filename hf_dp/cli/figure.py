"""``hf-dp figure``: draw what sweep, plan and partitions --chosen print with ``--json``.

A record is one run, one plan or one selection. Its blocks (``settings``, ``metrics``) become dotted
names, of which the last part is enough where it is unique. Where a list in it (``logs``,
``results``, ``parts``) holds a name that is asked for, each item becomes a record of its own.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp import _validate
from hf_dp.cli.cell_runs import in_words
from hf_dp.cli.options import Parser
from hf_dp.errors import ConfigError

EXAMPLES = """examples:
  hf-dp sweep --config recipe.yaml --grid target_epsilon=2,8 --output-dir outputs/s --json > s.json
  hf-dp figure s.json --x target_epsilon --y accuracy -o curve.png
  hf-dp figure s.json --x expected_batch_size --y learning_rate --color bleu -o heat_map.png
  hf-dp figure s.json --y accuracy -o bars.png
  hf-dp figure s.json --x parameters --y accuracy --by family target_epsilon -o sizes.png
  hf-dp figure s.json --x step --y logs.signal_to_noise -o log.png
  hf-dp figure plan.json --x expected_batch_size --y noise_multiplier -o noise.png
  hf-dp figure chosen.json --x kind --y block --color parts.magnitude -o chosen.png

A point is the mean over the seeds, with bars (or a band) from the smallest to the largest value.
"""

Record = Mapping[str, Any]
Records = Sequence[Record]
Names = Sequence[str]
LABEL = "label"
_SCORES = ("metrics", "zero_shot")  # seeds differ in them, on whichever axis they stand
_LINEAR = (*_SCORES, "logs")  # never on a logarithmic axis
_MANY = 30  # points of a curve, of which the spread is a band


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp figure",
        description="Draw records that sweep, plan or partitions printed with --json: curves with "
        "--x and --y, bars with --y alone, a heat map with --x, --y and --color.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="the JSON")
    add("--x", metavar="NAME", help="the horizontal axis")
    add("--y", metavar="NAME", required=True, help="the vertical axis; the length of bars")
    add("--color", metavar="NAME", help="the values of a heat map")
    add(
        "--by",
        nargs="*",
        metavar="NAME",
        help="a curve, a bar or a heat map for each combination of these (default: of all settings "
        "that vary and are on no axis)",
    )
    add(
        "--beside",
        metavar="CSV",
        help="points from elsewhere, such as a paper's; its columns are the last parts of the "
        "axes' names, and `label` for curves and bars",
    )
    add("-o", "--output", required=True, metavar="PICTURE", help="a PNG, PDF or SVG")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the picture and print its path; return 2 for records that it cannot show."""
    args = build_parser().parse_args(list(argv))
    _check_output(args.output)
    if args.color is not None and args.x is None:
        raise ConfigError(
            "`--color` is the value of a heat map over `--x` and `--y`. Add --x NAME."
        )
    named = [name for name in (args.x, args.y, args.color) if name is not None]
    records = read_records(args.file, [*named, *(args.by or [])])
    axes = [find(records, name) for name in named]
    by = _varied(records, axes) if args.by is None else [find(records, each) for each in args.by]
    numbers = axes[-1:] if args.color is not None else axes
    shown = [one for one in records if all(_is_number(one.get(key)) for key in numbers)]
    if not shown:
        raise ConfigError(f"No record of {args.file!r} has a number for each of {numbers}.")
    if len(shown) < len(records):
        lacking = f"{len(records) - len(shown)} of {len(records)} records"
        print(f"{lacking} have no number for {' or '.join(numbers)}", file=sys.stderr)
    kind = heat_maps if args.color is not None else curves if args.x is not None else bars
    beside: Records = []
    if args.beside is not None:
        beside = read_beside(args.beside, kind is not heat_maps, [_short(key) for key in axes])
    # a heat map has a blank place for what has no number
    figure = kind(
        records if kind is heat_maps else shown,
        axes,
        by,
        beside,
        "" if args.beside is None else Path(args.beside).stem,
    )
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)
    print(args.output)
    return 0


# -- records ---


def read_records(path: str, names: Names) -> list[Record]:
    """Return the records of a file, flat. Raises: ConfigError for a file without any."""
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


def _flat(row: Mapping[str, Any], names: Names) -> Iterator[Record]:
    plain: dict[str, Any] = {}
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
    """Return the full name. Raises: ConfigError for one that no record has, or that means two."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    found = [name] if name in keys else [key for key in keys if _is_called(key, name)]
    if not found:
        raise ConfigError(f"Expected each name to be one of {keys}, got {name!r}.")
    if any(record.get(found[0]) != record.get(key) for key in found for record in records):
        raise ConfigError(f"{name!r} may be any of {found}, which differ. Write one of these.")
    return found[0]


def _varied(records: Records, axes: Names) -> list[str]:
    values: dict[str, set[str]] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        if key.startswith("settings.") and key not in axes:
            values[key] = {json.dumps(record.get(key)) for record in records}
    return [key for key, found in values.items() if len(found) > 1]


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


def _settings(record: Record) -> str:
    return json.dumps([value for key, value in record.items() if key.startswith("settings.")])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_beside(path: str, labelled: bool, numbers: Names) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with these columns of numbers, and `label` where ``labelled``.

    Raises: ConfigError for a file that cannot be read, lacks a column, or has no finite number
        where one is needed.
    """
    columns = [*([LABEL] if labelled else []), *numbers]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows: list[dict[str, Any]] = list(reader)
            found = list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ConfigError(f"`--beside` cannot read {path!r}: {problem}") from problem
    if (missing := [column for column in columns if column not in found]) or not rows:
        raise ConfigError(
            f"Expected {path!r} to have points with the columns {columns}, which this figure "
            f"shows; it has {len(rows)} points, and lacks {missing} in {found}. Rename them, or "
            "leave `--beside` out."
        )
    for (line, row), name in itertools.product(enumerate(rows, start=2), numbers):
        try:
            number = float(row[name] or "")
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(
                f"Expected {name!r} in line {line} of {path!r} to be a number, got {row[name]!r}."
            )
        row[name] = number
    return rows


# -- figures ---


def _groups(
    records: Records, by: Names, place_of: Callable[[Record], Any]
) -> dict[str, dict[Any, list[Record]]]:
    """Return the records of each label by their place, where they differ in their seeds alone.

    Raises: ConfigError for others, whose mean would mean nothing.
    """
    found: dict[str, dict[Any, list[Record]]] = {}
    for one in records:
        label = _label(one, by)
        seeds = found.setdefault(label, {}).setdefault(place_of(one), [])
        for other in seeds:
            if other.get("seed") == one.get("seed"):
                differ = [key for key in one if one[key] != other.get(key)]
                raise ConfigError(
                    f"Two records of one seed are one point{f' of {label!r}' if label else ''}. "
                    f"Name in `--by` what tells them apart; they differ in {differ}."
                )
        seeds.append(one)
    return found


def _curve(groups: Mapping[Any, Records], x: str, y: str) -> tuple[list[list[float]], ...]:
    """Return the values of the seeds on each axis, point by point from left to right."""
    points = [tuple([one[key] for one in seeds] for key in (x, y)) for seeds in groups.values()]
    xs, ys = zip(*sorted(points, key=lambda point: statistics.mean(point[0])), strict=True)
    return list(xs), list(ys)


def curves(records: Records, axes: Names, by: Names, beside: Records, title: str) -> Any:
    """Draw a curve for each label; a label has the same color in both sources."""
    x, y = axes
    found = _groups(
        records, by, lambda one: (_settings(one), None if x.startswith(_SCORES) else one[x])
    )
    others = _groups(beside, [LABEL], lambda one: one[_short(x)])
    order = list(dict.fromkeys([*found, *others]))
    figure, (place,) = _panels(1, width=6.5, height=4.2)
    places: tuple[set[float], set[float]] = set(), set()
    for label, groups in found.items():
        xs, ys = _curve(groups, x, y)
        places[0].update(*xs)
        places[1].update(*ys)
        means = [[statistics.mean(each) for each in values] for values in (xs, ys)]
        style = {"color": f"C{order.index(label)}", "label": label or _short(y)}
        if len(xs) > _MANY:
            place.plot(*means, **style)
            low, high = [min(each) for each in ys], [max(each) for each in ys]
            place.fill_between(means[0], low, high, color=style["color"], alpha=0.2, linewidth=0)
        else:
            across = _spread(xs) if x.startswith(_SCORES) else None
            place.errorbar(*means, xerr=across, yerr=_spread(ys), marker="o", capsize=3, **style)
    for label, groups in others.items():
        xs, ys = _curve(groups, _short(x), _short(y))
        places[0].update(*xs)
        places[1].update(*ys)
        place.plot(
            *([value for (value,) in values] for values in (xs, ys)), linestyle="--", marker="o",
            markerfacecolor="white", color=f"C{order.index(label)}", label=f"{title}: {label}",
        )  # fmt: skip
    for axis, key, values in zip("xy", axes, places, strict=True):
        place.set(**{f"{axis}label": _short(key)})
        _scale(place, axis, key, sorted(values))
    if len(found) + len(others) > 1:
        _legend(place)
    return figure


def _scale(place: Any, axis: str, key: str, values: list[float]) -> None:
    """Make an axis logarithmic where what was set or computed spans a factor of 8.

    Its places are marked, of those that are near to each other the first.
    """
    if not key.startswith(_LINEAR) and _far_apart(values):
        marked = values[:1]
        for value in values:
            if value / marked[-1] >= (values[-1] / values[0]) ** 0.1:
                marked.append(value)
        place.set(**{f"{axis}scale": "log"})
        place.set(**{f"{axis}ticks": marked, f"{axis}ticklabels": [f"{v:.5g}" for v in marked]})
        place.tick_params(axis=axis, which="minor", length=0, labelleft=False, labelbottom=False)


def _far_apart(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) >= 8 * min(values)


def _spread(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return how far the smallest and the largest of each are from their mean."""
    return [
        [statistics.mean(each) - min(each) for each in values],
        [max(each) - statistics.mean(each) for each in values],
    ]


def _legend(place: Any) -> None:
    place.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def bars(records: Records, axes: Names, by: Names, beside: Records, title: str) -> Any:
    """Draw a bar for each label; the points of the other source are diamonds."""
    (key,) = axes
    groups = {
        label or _short(key): [one[key] for one in seeds]
        for label, found in _groups(records, by, lambda one: None).items()
        for seeds in found.values()
    }
    others = [(one[_short(key)], one[LABEL]) for one in beside]
    order = list(dict.fromkeys([*groups, *(label for _, label in others)]))
    figure, (place,) = _panels(1, width=6.5, height=0.5 * len(order) + 1.5)
    place.barh(
        [order.index(label) for label in groups], list(map(statistics.mean, groups.values())),
        xerr=_spread(list(groups.values())), color="tab:blue", height=0.6, capsize=3,
    )  # fmt: skip
    if others:
        place.plot(
            [value for value, _ in others], [order.index(label) for _, label in others],
            linestyle="none", marker="D", markerfacecolor="white", color="black", label=title,
        )  # fmt: skip
        _legend(place)
    place.set_yticks(range(len(order)), order)
    place.invert_yaxis()
    place.set_xlabel(_short(key))
    lowest = min([*itertools.chain(*groups.values()), *(value for value, _ in others)])
    place.set_xlim(left=min(lowest, max(0.0, lowest - 0.1)))
    return figure


def heat_maps(records: Records, axes: Names, by: Names, beside: Records, title: str) -> Any:
    """Draw a heat map for each label, with the values of the other source in parentheses."""
    from matplotlib.colors import LogNorm, Normalize

    maps = _means(records, axes, by)
    others = _means(beside, [_short(key) for key in axes], []).get("", {})
    every = [place for found in (*maps.values(), others) for place in found]
    columns, rows = (_in_order([place[axis] for place in every]) for axis in (0, 1))
    x, y, color = map(_short, axes)
    values = [value for found in maps.values() for value in found.values() if value is not None]
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
        place.set(ylabel=y, xlabel=x)
        words = [label, *([f"in parentheses: {title}"] if title else [])]
        place.set_title("\n".join(filter(None, words)), fontsize=9)
        figure.colorbar(image, label=color)
    return figure


def _means(records: Records, axes: Names, by: Names) -> dict[str, dict[Any, float | None]]:
    """Return the mean of each cell of each heat map, None for one without a number."""
    x, y, color = axes

    def place_of(one: Record) -> tuple[Any, ...]:
        found = (one.get(x), one.get(y))
        return tuple(value if _is_number(value) else in_words(value) for value in found)

    def mean(seeds: Records) -> float | None:
        values = [one[color] for one in seeds if _is_number(one.get(color))]
        return statistics.mean(values) if values else None

    found = _groups(records, by, place_of)
    return {
        label: {place: mean(seeds) for place, seeds in cells.items()}
        for label, cells in found.items()
    }


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Return each once: numbers rising, words in their order."""
    found = list(dict.fromkeys(values))
    return sorted(found) if all(_is_number(value) for value in found) else found


def _tick(value: Any) -> str:
    return f"{value:g}" if _is_number(value) else value or "-"


def _check_output(path: str) -> None:
    """Raise InvalidArgumentError for another kind of file, or where matplotlib is not installed."""
    kinds = [".png", ".pdf", ".svg"]
    if Path(path).suffix.lower() not in kinds:
        said = f"to end in one of {kinds}"
        raise _validate.invalid("output", path, said, "That decides what is written.")
    if importlib.util.find_spec("matplotlib") is None:
        raise _validate.invalid(
            "output", path, "with matplotlib installed", "Run `pip install hf-dp[plot]`."
        )


def _panels(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure and its ``count`` axes side by side, without upper and right edges."""
    from matplotlib.figure import Figure  # not pyplot: no display is touched

    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes
