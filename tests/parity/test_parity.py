"""Law 1 for all that people train: one table, held against one plain PyTorch process."""

import math
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from table import UNEQUAL, Row, run_case, run_ddp, text

ARTIFACTS = Path(__file__).parents[2] / "artifacts"


@pytest.fixture(scope="module")
def rows(_whole_run: Any) -> Any:
    """Rows as they are found; prints the table when all are there."""
    found: dict[str, Row] = {}
    yield found
    if len(found) == len(CASES):
        table = text([found[case.name] for case in CASES])
        print("\n\n" + table)
        ARTIFACTS.mkdir(exist_ok=True)
        (ARTIFACTS / "parity.txt").write_text(table + "\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_split_trains_as_one_process_does(case, rows):
    rows[case.name] = run_case(case)
    assert not rows[case.name].wrong(), rows[case.name].found


def test_plain_ddps_uniform_mean_is_wrong_for_every_one_where_batches_are_unequal(rows):
    tried = [rows.get(case.name, Row(case)) for case in CASES]
    run_ddp(tried)
    for row in tried:
        if "float64" in row.case.dtypes:
            value = row.ddp[UNEQUAL]
            assert math.isnan(value) or value > 1e-3, row.case.name
    assert tried[0].ddp_wrong() == [UNEQUAL], "equal batches are right"


def test_each_looser_bound_is_explained():
    for case in CASES:
        assert bool(case.bounds) == bool(case.note), case.name
