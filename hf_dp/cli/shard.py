"""``hf-dp shard``: sort rows by the steps that they take part in, for a run that streams them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_dp.cli.options import Parser
from hf_dp.plans.draws import POISSON, RandomAllocation

ALLOCATION = RandomAllocation.sampling

EXAMPLES = """examples:
  hf-dp shard a.parquet b.parquet --expected_batch_size 4096 --num_train_epochs 2 -o shards
  hf-dp shard stanfordnlp/sst2 --split train --expected_batch_size 1024 -o shards

then, in Python:
  DPTrainer(..., train_dataset=hf_dp.streams.load("shards"))  # look_over="when_drawn",
  # and the same sampling, expected_batch_size and num_train_epochs
"""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "hf-dp shard",
        description="Sort rows by the step of an epoch that each takes part in, by a secret key, "
        "with bounded memory. One run can read the folder, as its train_dataset. It is as secret "
        "as the rows. If this command is killed, run it again to continue.",
        epilog=EXAMPLES,
    )
    option = parser.option
    option("data", "Parquet files, JSON lines (.jsonl), or one name on the Hub", "DATA", nargs="+")
    option("--split", "of a data set of the Hub (default: train)", default="train")
    of_run = "the same as for the run"
    option("--expected-batch-size", of_run, "B", type=float, required=True)
    option("--num-train-epochs", f"{of_run} (default: 1)", "E", type=int, default=1)
    option("--sampling", f"{of_run}: {ALLOCATION} (default), {POISSON}", default=ALLOCATION)
    where = "arrow (default), or ray: files, on the machines of a cluster (hf-dp[ray])"
    option("--engine", where, default="arrow")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new folder")
    return parser


def main(argv: Sequence[str]) -> int:
    """Shard, and print what was made."""
    args = build_parser().parse_args(list(argv))
    from hf_dp.streams.shards import FILES, Plan, shard
    from hf_dp.tasks.sources import load_hub

    data = args.data
    if len(data) == 1 and Path(data[0]).suffix not in FILES and not Path(data[0]).is_file():
        data = load_hub(data[0], None, args.split)
    epochs, draw = args.num_train_epochs, args.sampling
    made = shard(
        data,
        args.output,
        expected_batch_size=args.expected_batch_size,
        num_train_epochs=epochs,
        sampling=draw,
        engine=args.engine,
    )
    plan = Plan.read(made)
    steps = "steps an epoch" if draw == ALLOCATION else "steps"
    print(
        f"{args.output}: {plan.rows:,} rows, {plan.steps:,} {steps} (expected batch "
        f"{plan.expected_batch_size:g}), {epochs} epochs, {draw}. {plan.secret}"
    )
    return 0
