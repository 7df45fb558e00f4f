"""Matrix products: Tandem's beside torch's, forward alone and with both gradients.

    taskset -c 0 python bench/products.py [--dtype bf16] [--from-memory] [--json products.json]

GFLOP per CPU second of each side's quickest call on one thread; the sides take turns. The weight's
gradient is added to the one before, as over micro-batches. The operands are the same from call to
call and stay in the caches, unless --from-memory lets the calls go through 256 MiB of them.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import DTYPES
from bench.report import Report, parser
from tandem.ops.rates import product_rate
from tandem.plan.doctor import rates_table

SHAPES = (
    (1536, 128, 128),
    (1536, 128, 352),
    (1536, 128, 512),
    (64, 128, 352),
    (64, 512, 1376),
    (768, 512, 1376),
    (384, 288, 768),
    (384, 288, 32000),
    (768, 576, 1536),
    (64, 576, 49152),
)
"""Rows, inputs and outputs of layers and heads: 1M, 15M, 22M and 135M weights."""


def main() -> dict[str, Any]:
    """Measure every shape; the table, and JSON where --json names a file."""
    arguments = parser(__doc__, "dtype default-allocator")
    arguments.add_argument(
        "--from-memory",
        action="store_true",
        help="other weights and rows with every call, as over a model's layers",
    )
    options = arguments.parse_args()
    report = Report(options)
    shapes = ((16, 32, 48),) if options.tiny else SHAPES
    seconds = 0.01 if options.tiny else 0.5
    from_memory = (2**16 if options.tiny else 2**28) if options.from_memory else 0
    rates = []
    for shape in shapes:
        rates.append(product_rate(*shape, DTYPES[options.dtype], seconds, from_memory))
        report.result["products"] = [asdict(rate) for rate in rates]
    report.console.print(rates_table(rates))
    return report.end()


if __name__ == "__main__":
    main()
