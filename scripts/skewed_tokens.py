"""Documents of skewed lengths as a token file: python scripts/skewed_tokens.py OUT [DOCUMENTS]

Lengths are log-normal, cut at 1024: half are below 147 and a tenth at 1024, as of ../docs/options/batching.md. Ids are
random, in GPT-2's vocabulary; 50256 ends a document. Writes OUT/skewed.npy and prints the words that train on it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

MEDIAN, SPREAD, LONGEST, END = 147, 1.514, 1024, 50256


def main() -> None:
    out, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(MEDIAN), SPREAD, count)).round().astype(int), 2, LONGEST)
    ids = draw.integers(0, END, lengths.sum() + count).astype(np.uint16)
    ids[np.cumsum(lengths + 1) - 1] = END
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "skewed.npy", ids)
    print(f"{count} documents, mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, "
          f"{np.mean(lengths == LONGEST):.1%} at {LONGEST}", file=sys.stderr)
    print(f"data.train={out / 'skewed.npy'} data.end={END}")


if __name__ == "__main__":
    main()
