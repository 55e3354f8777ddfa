"""What people train: each case a small task, in float64 or float32."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetkit as hk

SAMPLES, CLASSES, SIDE, WORDS = 76, 5, 8, 12
Batch = Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        name: What it is called there.
        task: Makes the task for a dtype.
        settings: Further settings of the session.
        dtypes: In which it is run.
        bounds: The largest difference from one process that is right, per dtype.
        note: Why a bound is looser than usual.
        fleet: Makes the devices for a number of ranks; None: CPUs.
        ranks: On how many ranks it is run.
    """

    name: str
    task: Callable[[torch.dtype], hk.Task]
    settings: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float64", "float32")
    bounds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    fleet: Callable[[int], Any] | None = None
    ranks: tuple[int, ...] = (1, 2, 4)

    def bound(self, dtype: str) -> float:
        return self.bounds.get(dtype, {"float64": 1e-12, "float32": 1e-5}[dtype])


# ── data ──


def images(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)
    noise = torch.randn(SAMPLES, 1, SIDE, SIDE, generator=generator)
    return (patterns[labels] + noise).to(dtype), labels


class Augmented(torch.utils.data.Dataset):
    """Each look at a picture adds noise and may mirror it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.images, self.labels = images(dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        image = image + 0.5 * torch.randn_like(image)
        return image.flip(-1) if torch.rand(()) < 0.5 else image, self.labels[index]


def sentences(_: torch.dtype) -> list[torch.Tensor]:
    """Word numbers above 0; between 1 and 12 of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 13, (SAMPLES,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def padded(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


def favourites(dataset: Any, generator: torch.Generator) -> Any:
    weights = 1.0 + torch.arange(SAMPLES) % 4
    return torch.utils.data.WeightedRandomSampler(weights, SAMPLES, generator=generator)


# ── models ──


class Mlp(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(SIDE * SIDE, 12),
            torch.nn.Tanh(),
            torch.nn.Linear(12, CLASSES),
        )


class Cnn(torch.nn.Sequential):
    """Convolutions, with layers that look across the samples or without."""

    def __init__(self, norm: Callable[[int], torch.nn.Module] | None = None) -> None:
        def block(before: int, after: int) -> list[torch.nn.Module]:
            norms = [] if norm is None else [norm(after)]
            bias = norm is None  # a bias before a norm has no gradient but rounding
            convolution = torch.nn.Conv2d(before, after, 3, padding=1, bias=bias)
            return [convolution, *norms, torch.nn.ReLU(), torch.nn.AvgPool2d(2)]

        last = [torch.nn.Flatten(), torch.nn.Linear(8 * 4, CLASSES)]
        super().__init__(*block(1, 4), *block(4, 8), *last)


class Tied(torch.nn.Module):
    """Two layers share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Experts(torch.nn.Module):
    """Each picture goes to one of four experts; in many batches, one has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, CLASSES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        chosen = (flat[:, 0] > 1.2).long() * 2 + (flat[:, 1] > 1.2)
        order, parts = [], []
        for number in chosen.unique().tolist():
            places = (chosen == number).nonzero().flatten()
            order.append(places)
            parts.append(self.experts[number](flat[places]))
        return torch.cat(parts)[torch.cat(order).argsort()]


class Partly(torch.nn.Module):
    """A frozen layer, a head that nothing looks at, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = torch.nn.Linear(64, 16), torch.nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.head, self.ignored = torch.nn.Linear(16, CLASSES), torch.nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.frozen(torch.tanh(self.body(x.flatten(1)))))
        self.ignored(hidden)
        return self.head(hidden)


class Waves(torch.nn.Module):
    """Complex parameters, and double ones, beside those of the usual type."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Parameter(torch.randn(SIDE, SIDE // 2 + 1, dtype=torch.complex64))
        self.shift = torch.nn.Parameter(torch.zeros(SIDE * SIDE, dtype=torch.float64))
        self.head = torch.nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x[:, 0]) * self.filter
        filtered = torch.fft.irfft2(spectrum, s=(SIDE, SIDE)).flatten(1)
        return self.head((filtered + self.shift).to(x.dtype))


class Checkpointed(Cnn):
    """Computes its blocks again in the backward instead of keeping what they gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = torch.nn.Sequential(*list(self)[:-2])
        return self[-1](self[-2](checkpoint(blocks, x, use_reentrant=False)))


class Words(torch.nn.Module):
    """Predicts the next word from the one before; word 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, 8, padding_idx=0)
        self.mix, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.table(words).cumsum(1))))


def double(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """In double precision where asked for; complex parameters too."""
    if dtype == torch.float32:
        return model
    for parameter in model.parameters():
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        parameter.data = parameter.data.to(wide)
    for buffer in model.buffers():
        buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
    return model


# ── losses ──


def cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def low(model: Any, batch: Batch) -> torch.Tensor:
    """So low that the first loss scale, 2¹⁶, overflows nowhere."""
    return cross_entropy(model, batch) / 16


def several(model: Any, batch: Batch) -> torch.Tensor:
    """Two forwards, two terms on the data and one on the weights."""
    once, mirrored = model(batch[0]), model(batch[0].flip(-1))
    agree = (once - mirrored).square().mean()
    return cross_entropy(model, batch) + 0.1 * agree + 0.01 * model[1].weight.square().sum()


def total(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def first_class_only(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over few samples: many micro-batches have none of them, and are 0/0."""
    weights = (batch[1] == 0).to(batch[0].dtype)
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * weights).sum() / weights.sum(), weights.sum()


def next_word(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over the words that are there."""
    ahead, given = batch[:, 1:], batch[:, :-1]
    losses = F.cross_entropy(model(given).transpose(1, 2), ahead, reduction="none")
    there = ahead != 0
    return losses[there].sum() / there.sum(), there.sum()


def hits(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


# ── optimizers ──


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # An epsilon that is no rounding's size: where a gradient is 0 but for that, Adam's step is
    # its sign, and no two ways to sum the same numbers agree on it.
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.3}, {"params": rest}]


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def halve(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def of(model: Callable[[], torch.nn.Module] = Mlp, **parts: Any) -> Callable[..., hk.Task]:
    """Returns a maker of tasks; a part that is called ``data`` gets the dtype."""
    data = parts.pop("data", images)

    def task(dtype: torch.dtype) -> hk.Task:
        usual = {"loss": cross_entropy, "optimizer": sgd}
        return hk.Task(model=lambda: double(model(), dtype), data=data(dtype), **{**usual, **parts})

    return task


def validated(dtype: torch.dtype) -> hk.Task:
    inputs, labels = images(dtype)
    few = labels.argsort()[::30]  # fewer than the ranks
    return of(
        validate=(inputs[few], labels[few]), metrics={"accuracy": hits, "first": first_class_only}
    )(dtype)


def channels_last(norm: Any = None) -> torch.nn.Module:
    return Cnn(norm).to(memory_format=torch.channels_last)


BF16 = "bf16 gradients are rounded per micro-batch: 2⁻⁸ each"
FP16 = "fp16 gradients are rounded per micro-batch: 2⁻¹¹ each"
MIXED = "against one process in float32, which rounds neither"
SINGLE = ("float32",)

CASES = [
    Case(name="SGD with momentum", task=of()),
    Case(name="AdamW", task=of(optimizer=adamw)),
    Case(name="learning rates per group", task=of(parameters=groups)),
    Case(name="gradient clipping", task=of(), settings={"clip_norm": 0.05}),
    Case(name="scheduler per step", task=of(scheduler=warm_up, scheduler_per="step")),
    Case(name="scheduler per epoch", task=of(scheduler=halve)),
    Case(name="micro-batches of 3", task=of(), settings={"micro_batch": 3}),
    Case(
        name="sums over the samples",
        task=of(loss=total, reduction="sum", optimizer=slow_sgd),
        settings={"micro_batch": 7},
    ),
    Case(name="several losses and forwards", task=of(loss=several)),
    Case(
        name="counts that are often 0", task=of(loss=first_class_only), settings={"micro_batch": 3}
    ),
    Case(
        name="words of unequal sentences",
        task=of(Words, data=sentences, loss=next_word, collate=padded),
    ),
    Case(name="validation on 3 samples", task=validated),
    Case(name="augmentation", task=of(data=Augmented)),
    Case(name="weighted sampler", task=of(sampler=favourites)),
    Case(name="loader processes", task=of(num_workers=1)),
    Case(name="shared parameters", task=of(Tied)),
    Case(
        name="parameters that few samples use",
        task=of(Experts, optimizer=adamw, find_unused_parameters=True),
    ),
    Case(name="frozen, ignored, buffers", task=of(Partly, optimizer=adamw)),
    Case(name="complex and double parameters", task=of(Waves, optimizer=slow_sgd)),
    Case(name="BatchNorm", task=of(lambda: Cnn(torch.nn.BatchNorm2d))),
    Case(
        name="BatchNorm, counts that are often 0",
        task=of(lambda: Cnn(torch.nn.BatchNorm2d), loss=first_class_only),
    ),
    Case(
        name="BatchNorm in rounds",
        task=of(lambda: Cnn(torch.nn.BatchNorm2d)),
        settings={"micro_batch": 4},
    ),
    Case(name="gradient checkpointing", task=of(Checkpointed)),
    Case(
        name="checkpointing and BatchNorm",
        task=of(lambda: Checkpointed(torch.nn.BatchNorm2d)),
    ),
    Case(
        name="torch.compile",
        task=of(lambda: torch.compile(Mlp(), backend="aot_eager", dynamic=True)),
        ranks=(2,),
    ),
    Case(
        name="torch.compile and BatchNorm",
        task=of(
            lambda: torch.compile(Cnn(torch.nn.BatchNorm2d), backend="aot_eager", dynamic=True)
        ),
        ranks=(2,),
    ),
    Case(name="channels_last", task=of(channels_last)),
    Case(
        name="AMP bf16",
        task=of(),
        settings={"amp": "bf16"},
        dtypes=SINGLE,
        bounds={"float32": 3e-2},
        note=BF16,
        fleet=lambda ranks: hk.emulate(f"{ranks}xA100", sample_s=1e-6),
    ),
    Case(
        name="AMP fp16",
        task=of(loss=low, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.6)),
        settings={"amp": "fp16"},
        dtypes=SINGLE,
        bounds={"float32": 3e-3},
        note=FP16,
        fleet=lambda ranks: hk.emulate(f"{ranks}xV100", sample_s=1e-6),
    ),
    Case(
        name="AMP bf16 and fp16",
        task=of(),
        settings={"amp": "auto"},
        dtypes=SINGLE,
        bounds={"float32": 3e-2},
        note=MIXED,
        fleet=lambda ranks: hk.emulate(f"{ranks // 2}xA100 + {ranks // 2}xV100", sample_s=1e-6),
    ),
]
