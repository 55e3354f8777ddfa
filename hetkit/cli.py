"""The command line: ``hetkit devices`` and ``hetkit demo``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from hetkit.devices.fleet import emulate
from hetkit.devices.inventory import devices
from hetkit.errors import HetkitError, MissingExtraError
from hetkit.session import Session
from hetkit.task import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for a failure, 2 for words it cannot take."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except HetkitError as error:
        print(f"hetkit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hetkit: interrupted; the workers are gone.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetkit", description="Interactive experiments on unlike GPUs."
    )
    parser.set_defaults(command=lambda _: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")
    command = commands.add_parser("devices", help="what this machine has, and what to mend")
    command.set_defaults(command=_show_devices)
    command = commands.add_parser(
        "demo", help="train on emulated devices, switch settings, compare (about 15 seconds)"
    )
    command.add_argument("--fleet", default="1xA100 + 1xV100", help="default: %(default)s")
    command.add_argument(
        "--pace",
        default=2.3,
        type=float,
        help="speed of the first kind of device; the others' is 1",
    )
    command.add_argument("--global-batch", default=64, type=int, help="default: %(default)s")
    command.add_argument("--epochs", default=2, type=int, help="for each setting (default 2)")
    command.set_defaults(command=_run_demo)
    return parser


def _show_devices(_: argparse.Namespace) -> None:
    print(devices())


def _run_demo(options: argparse.Namespace) -> None:
    first_name = options.fleet.split("+")[0].split("x", 1)[-1].strip()
    fleet = emulate(options.fleet, pace={first_name: options.pace})
    print(fleet)
    phases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("an even split: every device waits for the slowest", {"batches": "even"}),
        ("batches balanced by measured speed", {"batches": "auto"}),
        ("mixed precision on top", {"amp": "auto"}),
    )
    task = digits_task()
    with Session(task, devices=fleet, global_batch=options.global_batch) as session:
        for title, settings in phases:
            print(f"\n── {title} ──", flush=True)
            session.set(**settings)
            session.run(epochs=options.epochs)
            session.wait()
            _print_last_epoch(session)
        print(f"\n{session.ledger}\n\n{session.verdict()}")
        print(f"\ntest accuracy of the model in this process: {_accuracy(session):.1%}")


def _print_last_epoch(session: Session) -> None:
    row = session.ledger[-1]
    print(
        f"after {row.epoch + 1} epochs: batches {' + '.join(map(str, row.batches))}, "
        f"{row.samples_per_s:,.0f} samples/s (emulated), loss {row.loss:.3f}, "
        f"accuracy {row.metrics['accuracy']:.1%}"
    )


def _accuracy(session: Session) -> float:
    import torch

    images, labels = _digits()[1]
    with torch.no_grad():
        guesses = session.model().eval()(torch.as_tensor(images)).argmax(1)
    return float((guesses == torch.as_tensor(labels)).float().mean())


def digits_task() -> Task:
    """Returns the demo's task: a small CNN on scikit-learn's handwritten digits.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    import torch
    from torch import nn

    class DigitsNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(512, 10),
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layers(images)
            return logits

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        hits = model(images).argmax(1) == labels
        return torch.as_tensor(hits).float().mean()

    train, test = _digits()
    return Task(
        model=DigitsNet,
        data=train,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
        validate=test,
        metrics={"accuracy": accuracy},
    )


def _digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns (images, labels) to train on and to test on: 1,437 and 360 of the 1,797 digits."""
    import numpy as np

    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'the demo needs scikit-learn for its data: pip install "hetkit[demo]".'
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


if __name__ == "__main__":
    sys.exit(main())
