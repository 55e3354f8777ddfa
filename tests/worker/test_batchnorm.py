"""Batch normalisation over four real ranks, against PyTorch's own on the whole batch."""

import copy
import pickle
from typing import Any

import pytest
import torch

import hetkit as hk
from hetkit.errors import LossError
from hetkit.worker.batchnorm import share_batchnorm

SHARES = [5, 1, 0, 3]
CHANNELS = 4
KINDS = {
    "1d": (torch.nn.BatchNorm1d, ()),
    "1d of sequences": (torch.nn.BatchNorm1d, (7,)),
    "2d": (torch.nn.BatchNorm2d, (3, 5)),
    "3d": (torch.nn.BatchNorm3d, (2, 3, 2)),
    "PyTorch's own synchronised": (torch.nn.SyncBatchNorm, (3, 5)),
}
OPTIONS = {
    "usual": {},
    "plain": {"affine": False, "track_running_stats": False},
    "average": {"momentum": None, "eps": 0.1},
}


@pytest.fixture(scope="module")
def ranks(_whole_run: Any):
    """Four ranks of a session that train something else; calls run between its steps."""
    task = hk.Task(
        model=lambda: torch.nn.Linear(2, 1),
        data=torch.ones(8, 2),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with hk.Session(task, devices="cpu*4", global_batch=4) as session:
        session.run(epochs=1)
        session.wait(60.0)
        yield session


def inputs(size: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(sum(SHARES), CHANNELS, *size, generator=generator, dtype=torch.float64)
    return values * 3 + 100 * torch.arange(CHANNELS).view(-1, *[1] * len(size))


def coefficients(values: torch.Tensor) -> torch.Tensor:
    """What the loss multiplies the outputs by: nothing cancels."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(values.shape, generator=generator, dtype=values.dtype)


def make(kind: str, options: dict[str, Any]) -> torch.nn.Module:
    layer = KINDS[kind][0](CHANNELS, **options).double()
    if layer.affine:
        torch.nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(7))
        torch.nn.init.uniform_(layer.bias, generator=torch.Generator().manual_seed(8))
    return layer


def whole(kind: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two training steps of one process on the whole batch, and an evaluation."""
    layer = make(kind.replace("PyTorch's own synchronised", "2d"), options)
    found = {}
    for step in range(2):
        x = inputs(KINDS[kind][1], step).requires_grad_()
        layer.zero_grad()
        y = layer(x)
        (y * coefficients(y)).sum().backward()
        found |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        found |= {f"d{name}{step}": p.grad for name, p in layer.named_parameters()}
    found |= {name: buffer.double() for name, buffer in layer.named_buffers()}
    return found


def shared(kind: str, options: dict[str, Any], loss_scale: float = 1.0):
    """The same, as a function for ranks that have unequal parts; one has a stand-in for none."""

    def run(worker: Any) -> dict[str, torch.Tensor]:
        layer = make(kind, options)
        statistics = share_batchnorm(layer)
        statistics.join(torch.distributed.new_group())
        scale = loss_scale**worker.rank
        share, first = SHARES[worker.rank], sum(SHARES[: worker.rank])
        found = {}
        for step in range(2):
            every = inputs(KINDS[kind][1], step)
            x = (every[first : first + share] if share else every[:2] * 1e6).requires_grad_()
            layer.zero_grad()
            statistics.begin_micro_batch(empty=not share, loss_scale=scale)
            y = layer(x)
            statistics.end_forward()
            loss = (y * coefficients(every)[first : first + share]).sum() if share else 0.0
            (scale * (loss + sum(statistics.starts(None)))).backward()
            assert share or not x.grad.any()
            found |= {f"y{step}": y.detach()[:share], f"dx{step}": x.grad[:share] / scale}
            found |= {f"d{name}{step}": p.grad / scale for name, p in layer.named_parameters()}
        return found | {name: buffer.double() for name, buffer in layer.named_buffers()}

    return run


def together(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.startswith(("y", "dx")):
        return torch.cat(parts)
    if name.startswith("d"):  # the exchange sums the parameters' gradients
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts), "running statistics are bit-equal"
    return parts[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_unequal_parts_and_none_are_as_the_whole_batch_in_one_process(ranks, kind, options):
    expected = whole(kind, OPTIONS[options])
    every = ranks.call(shared(kind, OPTIONS[options]))
    assert every[0].keys() == expected.keys()
    for name, value in expected.items():
        found = together(name, [each[name] for each in every])
        assert torch.linalg.vector_norm(found - value) <= 1e-12 * torch.linalg.vector_norm(value)


def test_each_rank_has_a_loss_scale_of_its_own(ranks):
    expected = whole("2d", {})
    every = ranks.call(shared("2d", {}, loss_scale=1024.0))
    for name, value in expected.items():
        found = together(name, [each[name] for each in every])
        assert torch.linalg.vector_norm(found - value) <= 1e-12 * torch.linalg.vector_norm(value)


def half(worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layer = torch.nn.BatchNorm2d(CHANNELS)
    statistics = share_batchnorm(layer)
    statistics.join(torch.distributed.new_group())
    dtype = torch.bfloat16 if worker.rank else torch.float32
    x = torch.randn(2, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(worker.rank))
    x = x.to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    statistics.begin_micro_batch(empty=False, loss_scale=1.0)
    y = layer(x)
    y.square().sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert statistics.waited_s > 0
    return x.detach().float(), y.detach().float()


def test_ranks_may_compute_in_unlike_precisions(ranks):
    xs, ys = zip(*ranks.call(half), strict=True)
    expected = torch.nn.BatchNorm2d(CHANNELS)(torch.cat(xs))
    torch.testing.assert_close(torch.cat(ys), expected.detach(), rtol=0.02, atol=0.02)


def test_a_single_value_over_all_ranks_is_refused_as_pytorch_does(ranks):
    def run(worker: Any) -> str:
        layer = torch.nn.BatchNorm1d(CHANNELS)
        statistics = share_batchnorm(layer)
        statistics.join(torch.distributed.new_group())
        statistics.begin_micro_batch(empty=worker.rank != 1, loss_scale=1.0)
        with pytest.raises(ValueError, match="more than one value per channel") as caught:
            layer(torch.ones(1, CHANNELS))
        return str(caught.value)

    assert "global_batch" in ranks.call(run)[0]


# ── what needs no other rank ──


def test_layers_stay_the_objects_they_were_and_subclasses_are_left_alone():
    class Own(torch.nn.BatchNorm1d):
        """Its forward is the user's own."""

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Own(3), torch.nn.GroupNorm(1, 3))
    first, keys = model[0], list(model.state_dict())
    assert share_batchnorm(model) is not None
    assert model[0] is first
    assert isinstance(first, torch.nn.BatchNorm1d)
    assert type(model[1]) is Own
    assert list(model.state_dict()) == keys


def test_without_a_group_in_eval_mode_and_off_it_is_pytorchs_own():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    plain, layer = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    statistics = share_batchnorm(layer)
    assert torch.equal(layer(x), plain(x))
    statistics.join(None)
    statistics.active = False
    assert torch.equal(layer(x), plain(x))
    statistics.active = True
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    assert torch.equal(layer.running_var, plain.running_var)


def test_it_can_be_copied_and_pickled_without_its_group():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    share_batchnorm(model).join(None)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(torch.ones(2, 3)).shape == (2, 3)
        assert other.state_dict().keys() == model.state_dict().keys()


def test_layers_that_run_for_some_micro_batches_only_are_refused():
    layer = torch.nn.BatchNorm1d(3)
    statistics = share_batchnorm(layer)
    for calls in (2, 1):  # not yet across the ranks: that is the first samples' number
        statistics.begin_micro_batch(empty=False, loss_scale=1.0)
        for _ in range(calls):
            layer(torch.ones(2, 3))
        statistics.end_forward()
    statistics.join(None)
    with pytest.raises(LossError, match=r"ran 1 times .* 2 times .*sync_batchnorm=False"):
        statistics.end_forward()


def test_a_model_without_such_layers_shares_nothing():
    assert share_batchnorm(torch.nn.Linear(2, 2)) is None
