"""What balancing brings on unlike devices: throughput against the even split and the bound.

Even and automatic split in turn (A B A B) on the same emulated devices, 1 : 2.3 and 4×1 + 2×2.3.
The bound is Σ v_i / (n · v_min), what perfect balancing of the compute alone could bring.

Run: python tests/benchmarks/bench_balance.py
"""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from digits import make_task

import hetkit as hk

ROUNDS = 2
LIMIT_S = 300.0
FLEETS = {
    "1xA100 + 1xV100": (64, 0.0025),
    "2xA100 + 4xV100": (192, 0.005),
}
PACE = {"A100": 2.3}


def epoch_speed(session: hk.Session, batches: str) -> float:
    """Trains two epochs under a split and returns the second's samples/s."""
    session.set(batches=batches)
    session.run(epochs=2)
    session.wait(LIMIT_S)
    return session.ledger[-1].samples_per_s


def main() -> None:
    for spec, (global_batch, sample_s) in FLEETS.items():
        fleet = hk.emulate(spec, pace=PACE, sample_s=sample_s)
        paces = [device.emulation.pace for device in fleet if device.emulation]
        bound = sum(paces) / (len(paces) * min(paces))
        with hk.Session(make_task(), devices=fleet, global_batch=global_batch) as session:
            even, auto = [], []
            for _ in range(ROUNDS):
                even.append(epoch_speed(session, "even"))
                auto.append(epoch_speed(session, "auto"))
            row = session.ledger[-1]
            replans = [e for e in session.history.events if e.kind == "plan"]
        gain = median(auto) / median(even)
        print(
            f"{spec}: even {median(even):,.0f}, balanced {median(auto):,.0f} samples/s (emulated): "
            f"{gain:.2f}× of a bound of {bound:.2f}× ({gain / bound:.1%}); batches "
            f"{list(row.batches)}, spread {row.compute_spread:.1%} (floor "
            f"{row.spread_floor or 0:.1%}), {len(replans)} re-plans inside epochs"
        )


if __name__ == "__main__":
    main()
