"""Every layout that the rules allow, priced by the engine: what `gradus plan --search` should have found.

    python benchmarks/search_exhaustive.py            # all cases: benchmarks/results/search-exhaustive.jsonl
    python benchmarks/search_exhaustive.py gpt2       # one of them

Of each way to split the devices the fastest layout that leaves the head room is kept: a row each, fastest first.
`tests/plan/test_search.py` compares the search's answers with these rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.plan.case import Case
from gradus.plan.hf import recipe_for
from gradus.plan.search import CHECKPOINTING, HEADROOM, Candidate, Space
from gradus.recipe.schema import Batch, Layout
from gradus.rows import Row

CASES = {  # name → (preset, samples of a step, devices, kind of device)
    "gpt2": ("gpt2-small", 16, 8, "A100-80GB"),
    "llama": ("llama2-7b", 8, 8, "A100-80GB"),
    "t5": ("t5-base", 8, 4, "V100-32GB"),
}
RESULTS = Path(__file__).parent / "results" / "search-exhaustive.jsonl"
BEST = 20


def space_of(case: str) -> Space:
    preset, samples, n, device = CASES[case]
    recipe = recipe_for(preset)
    recipe = recipe.model_copy(update={"batch": Batch(samples=samples), "layout": Layout(device="cuda")})
    return Space(Case.of(recipe, n, "cuda"), Cluster(hardware.devices()[device], n))


def layouts(space: Space) -> Iterator[tuple[int, Layout]]:
    """(number of the way to split, layout)."""
    for way, split in enumerate(space.splits()):
        for micro in space.micro_batch_sizes(split):
            for variant in space.variants(split.model_copy(update={"micro_batch": micro})):
                for checkpointing in CHECKPOINTING:
                    if checkpointing == "none" or variant.pipeline == 1 or variant.schedule != "zero_bubble":
                        yield way, variant.model_copy(update={"checkpointing": checkpointing})


def best_of_each_way(space: Space) -> tuple[list[Candidate], int]:
    """(fastest first, how many were priced)."""
    best: dict[int, Candidate] = {}
    priced = 0
    for way, layout in layouts(space):
        try:
            c = space.evaluate(layout)
        except UserError:  # it cannot be traced
            continue
        priced += 1
        if c.needed <= HEADROOM * c.capacity and (way not in best or c.order < best[way].order):
            best[way] = c
    return sorted(best.values(), key=lambda c: c.order), priced


def main(names: list[str]) -> None:
    others = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    for case in names or CASES:
        found, priced = best_of_each_way(space_of(case))
        conditions = dict(zip(("preset", "samples", "devices", "device"), CASES[case]))
        conditions |= {"case": case, "priced": priced, "ways": len(found)}
        rows = [
            Row("search/step", c.seconds, "s", None, {**conditions, "rank": i, "layout": c.keys})
            for i, c in enumerate(found[:BEST], 1)
        ]
        others = [line for line in others if f'"case": "{case}"' not in line] + [row.json() for row in rows]
        RESULTS.write_text("\n".join(others) + "\n")
        print(f"{case}: {priced} priced, {len(found)} ways fit; best {found[0].seconds:.4g} s: {found[0].keys}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
