"""Runs the parity suite and prints its table.

Run: python tests/parity/table.py
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from cases import CASES, Case
from plain import SEED, Plain, flat, uniform_mean

import hetkit as hk

GLOBAL_BATCH = 20  # of 76 samples: the last of an epoch's four steps has 16
EPOCHS = 3
LIMIT_S = 120.0
DDP = {"DDP 10:10": (10, 10), "DDP 16:4": (16, 4)}
"""Plain DDP, which averages the ranks evenly."""

UNEQUAL = "DDP 16:4"

SPLITS: dict[int, dict[str, list[Any]]] = {
    1: {"1": [20]},
    2: {"1:2.3": [1.0, 2.3], "5:1": [5.0, 1.0], "0:20": [0, 20]},
    4: {"5:1:2.3:1": [5.0, 1.0, 2.3, 1.0], "0:17:1:2": [0, 17, 1, 2]},
}
"""Per number of ranks the splits; in float64 each is trained for an epoch."""

CURVES = {4: "5:1:2.3:1"}
"""Per number of ranks the split of the float32 curve over three epochs."""

COLUMNS = [
    *(f"f64 {ranks} {split}" for ranks, splits in SPLITS.items() for split in splits),
    *(f"f32 {ranks} {split}" for ranks, split in CURVES.items()),
]


@dataclass
class Row:
    """What was found for a case: column to the largest relative difference from one process."""

    case: Case
    found: dict[str, float] = field(default_factory=dict)
    ddp: dict[str, float] = field(default_factory=dict)

    def ddp_wrong(self) -> list[str]:
        """Columns in which plain DDP's gradient is not within the bound."""
        bound = self.case.bound("float64")
        return [name for name, value in self.ddp.items() if not value <= bound]

    def wrong(self) -> list[str]:
        """Columns whose difference is above the case's bound."""
        return [
            name
            for name, value in self.found.items()
            if not value <= self.case.bound("float64" if name.startswith("f64") else "float32")
        ]


def difference(found: Any, expected: Any) -> float:
    """The norm of the error, relative to the norm of what it should be."""
    found, expected = (torch.as_tensor(each, dtype=torch.float64) for each in (found, expected))
    error = torch.linalg.vector_norm(found - expected)
    return float(error / torch.linalg.vector_norm(expected))


def curve_difference(found: Any, expected: Any) -> float:
    """The largest relative error of a curve's points."""
    found, expected = (torch.as_tensor(each, dtype=torch.float64) for each in (found, expected))
    return float(((found - expected).abs() / expected.abs()).max())


def weights(worker: Any) -> torch.Tensor:
    """All parameters and buffers."""
    parts = [p.detach() for p in (*worker.model.parameters(), *worker.model.buffers())]
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in parts]
    return torch.cat([part.double().flatten() for part in parts])


def epochs(case: Case, task: hk.Task, ranks: int, splits: list[Any]) -> Iterator[float]:
    """Trains an epoch with each split beside one process; yields the largest difference so far."""
    plain = Plain(task)
    devices = case.fleet(ranks) if case.fleet else "inline" if ranks == 1 else f"cpu*{ranks}"
    with hk.Session(
        task,
        devices=devices,
        global_batch=GLOBAL_BATCH,
        seed=SEED,
        batches=splits[0],
        **case.settings,
    ) as session:
        for split in splits:
            session.set(batches=split)
            session.run(epochs=1)
            session.wait(LIMIT_S)
            plain.train(session.plan)
            losses = session.history.series("loss")[1]
            every = session.call(weights)
            assert all(torch.equal(each, every[0]) for each in every), "the ranks have parted"
            found = [curve_difference(losses, plain.losses)]
            if case.dtypes == ("float64", "float32"):
                found.append(difference(every[0], weights(plain)))
            for name, value in plain.metrics.items():
                found.append(difference(session.ledger[-1].metrics[name], value))
            yield max(found)


def run_case(case: Case) -> Row:
    """Runs a case over all splits, ranks and precisions."""
    row = Row(case)
    if "float64" in case.dtypes:
        task = case.task(torch.float64)
        for ranks in case.ranks:
            splits = SPLITS[ranks]
            every = epochs(case, task, ranks, list(splits.values()))
            for split, value in zip(splits, every, strict=True):
                row.found[f"f64 {ranks} {split}"] = value
    for ranks, split in CURVES.items():
        if ranks not in case.ranks:
            continue
        every = epochs(case, case.task(torch.float32), ranks, [SPLITS[ranks][split]] * EPOCHS)
        row.found[f"f32 {ranks} {split}"] = max(every)
    return row


def run_ddp(rows: list[Row]) -> None:
    """Gives plain DDP the first step of each case."""
    anything = CASES[0].task(torch.float64)
    with hk.Session(anything, devices="cpu*2", global_batch=GLOBAL_BATCH) as session:
        session.run(epochs=1)
        session.wait(LIMIT_S)
        for row in rows:
            if "float64" not in row.case.dtypes:
                continue
            task = row.case.task(torch.float64)
            plain = Plain(task)
            returned = task.loss(plain.model, plain.batch(0, 0, GLOBAL_BATCH))
            (returned[0] if isinstance(returned, tuple) else returned).backward()
            whole = [p.grad for p in plain.model.parameters()]
            unused = bool(task.find_unused_parameters) or any(g is None for g in whole)
            expected = flat(g for g in whole if g is not None)
            for name, shares in DDP.items():
                every = session.call(uniform_mean(task, shares, unused))
                row.ddp[name] = difference(every[0], expected)


def run() -> list[Row]:
    """Runs the whole suite."""
    rows = [run_case(case) for case in CASES]
    run_ddp(rows)
    return rows


def text(rows: list[Row]) -> str:
    """The table, with a footnote for each bound that is looser than usual."""
    notes = list(dict.fromkeys(row.case.note for row in rows if row.case.note))
    names = [
        row.case.name + (f" [{notes.index(row.case.note) + 1}]" if row.case.note else "")
        for row in rows
    ]
    wide = max(map(len, names))
    head = [f"{'':{wide}}", *COLUMNS, *DDP]
    lines = [
        "Largest relative difference from one plain PyTorch process.",
        "f64: losses, weights and buffers after an epoch, ≤ 1e-12; f32: the same over "
        f"{EPOCHS} epochs, ≤ 1e-5; then the ranks and their split.",
        "DDP: the gradient of the first step that PyTorch's DDP makes by itself, in f64.",
        "",
        "  ".join(head),
    ]
    for row, name in zip(rows, names, strict=True):
        cells = [_cell(row.found.get(column), column in row.wrong()) for column in COLUMNS]
        cells += [_cell(row.ddp.get(name), name in row.ddp_wrong()) for name in DDP]
        padded = [f"{cell:>{len(column)}}" for cell, column in zip(cells, head[1:], strict=True)]
        lines.append("  ".join([f"{name:{wide}}", *padded]))
    lines += ["", *(f"[{place}] {note}." for place, note in enumerate(notes, 1))]
    lines.append("✗: above the bound.")
    return "\n".join(lines)


def _cell(value: float | None, wrong: bool) -> str:
    if value is None:
        return "–"
    shown = "nan" if math.isnan(value) else "0" if value == 0 else f"{value:.0e}"
    return shown + (" ✗" if wrong else "")


if __name__ == "__main__":
    print(text(run()))
