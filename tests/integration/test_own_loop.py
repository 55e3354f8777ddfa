"""A training loop of one's own: the same maths as one plain process, led by the same controls."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetkit as hk
from hetkit.worker.order import epoch_order

SEED = 3
GLOBAL_BATCH = 24
SAMPLES = 100  # the last of an epoch's five steps has 4 samples
STEPS = 5
WAIT_S = 60.0


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels, and a noise vector for each sample."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return inputs, labels, torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)


def net(inputs: int = 6, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def steps(epochs: int) -> Any:
    """The batches that one plain process sees."""
    parts = data()
    for epoch in range(epochs):
        order = epoch_order(SAMPLES, SEED, epoch)
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            yield epoch, tuple(part[order[start : start + GLOBAL_BATCH]] for part in parts)


def weights(worker: Any) -> torch.Tensor:
    every = [p for model in worker.models.values() for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in every]).clone()


def flat(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))


def train_all(loop: Any, devices: Any, **settings: Any) -> tuple[list[torch.Tensor], np.ndarray]:
    """Returns each rank's weights after the whole loop, and the loss curve."""
    arguments = {"global_batch": GLOBAL_BATCH, "seed": SEED, **settings}
    with hk.Session(loop, devices=devices, **arguments) as session:
        session.run()
        session.wait(WAIT_S)
        return session.call(weights), session.history.series("loss")[1]


SPLITS = [
    ("inline", {}),
    ("cpu*1", {"micro_batch": 5}),
    ("cpu*2", {"batches": [17, 7], "micro_batch": 4}),
    ("cpu*2", {"batches": [24, 0]}),
    ("cpu*3", {"batches": [1, 20, 3], "micro_batch": 7}),
]


# ── one model ──


def classify(worker: Any) -> None:
    model = worker.wrap(net())
    optimizer = worker.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    worker.keep(scheduler=scheduler)
    train_set = data()
    for _ in worker.epochs(3):
        for batch in worker.batches(train_set):
            with worker.step():
                for inputs, labels, _ in worker.micro_batches(batch):
                    worker.backward(F.cross_entropy(model(inputs), labels), count=len(labels))
        scheduler.step()
        found = worker.evaluate(train_set, {"accuracy": accuracy})
        worker.log(seen=found["accuracy"])


def accuracy(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


@pytest.fixture(scope="module")
def classified() -> tuple[torch.Tensor, list[float], list[float]]:
    torch.manual_seed(SEED)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses, accuracies, now = [], [], 0
    for epoch, (inputs, labels, _) in steps(3):
        if epoch != now:
            now = epoch
            scheduler.step()
            accuracies.append(float(accuracy(model, data())))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return flat(model), losses, [*accuracies, float(accuracy(model, data()))]


@pytest.mark.parametrize(("devices", "settings"), SPLITS, ids=str)
def test_a_loop_trains_as_in_one_process(devices, settings, classified):
    expected, losses, _ = classified
    every, curve = train_all(classify, devices, **settings)
    for each in every:
        assert torch.equal(each, every[0])
    assert relative(every[0], expected) < 1e-12
    np.testing.assert_allclose(curve, losses, rtol=1e-12)


def test_the_ledger_has_what_the_loop_measures(classified):
    with hk.Session(
        classify, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED, batches=[17, 7]
    ) as session:
        session.run()
        session.wait(WAIT_S)
        for name in ("accuracy", "seen"):
            shown = [row.metrics[name] for row in session.ledger]
            np.testing.assert_allclose(shown, classified[2], rtol=1e-12)
        assert [row.last_step for row in session.ledger] == [4, 9, 14]
        model = session.model()
        assert isinstance(model, nn.Sequential)
        assert relative(flat(model), classified[0]) < 1e-12


# ── two models, two optimizers ──


def play(worker: Any) -> None:
    """A small GAN, as its loop is usually written."""
    generator = worker.wrap(net(4, 6), "generator")
    critic = worker.wrap(net(6, 1), "critic")
    opt_g = worker.optimizer(torch.optim.Adam(generator.parameters(), 1e-2))
    opt_c = worker.optimizer(torch.optim.Adam(critic.parameters(), 2e-2))
    for _ in worker.epochs(2):
        for real, _, noise in worker.batches(data()):
            ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
            with worker.step():
                opt_c.zero_grad()
                fake = generator(noise)
                judge = F.binary_cross_entropy_with_logits
                worker.backward(judge(critic(real), ones), count=len(real))
                worker.backward(judge(critic(fake.detach()), zeros), count=len(real))
                opt_c.step()
                opt_g.zero_grad()
                worker.backward(judge(critic(fake), ones), count=len(real))
                opt_g.step()


@pytest.fixture(scope="module")
def played() -> torch.Tensor:
    torch.manual_seed(SEED)
    generator, critic = net(4, 6), net(6, 1)
    opt_g = torch.optim.Adam(generator.parameters(), 1e-2)
    opt_c = torch.optim.Adam(critic.parameters(), 2e-2)
    judge = F.binary_cross_entropy_with_logits
    for _, (real, _, noise) in steps(2):
        ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
        opt_c.zero_grad()
        fake = generator(noise)
        judge(critic(real), ones).backward()
        judge(critic(fake.detach()), zeros).backward()
        opt_c.step()
        opt_g.zero_grad()
        judge(critic(fake), ones).backward()
        opt_g.step()
    return flat(generator, critic)


@pytest.mark.parametrize(
    ("devices", "settings"),
    [("cpu*1", {}), ("cpu*2", {"batches": [17, 7]}), ("cpu*3", {"batches": [0, 20, 4]})],
    ids=str,
)
def test_a_gan_trains_as_in_one_process(devices, settings, played):
    every, _ = train_all(play, devices, **settings)
    for each in every:
        assert torch.equal(each, every[0])
    assert relative(every[0], played) < 1e-12


def test_several_models_come_back_by_name(played):
    with hk.Session(play, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.run()
        session.wait(WAIT_S)
        models = session.model()
        assert list(models) == ["generator", "critic"]
        assert relative(flat(*models.values()), played) < 1e-12


# ── denominators ──


def masked(model: nn.Module, inputs: Any, labels: Any) -> tuple[torch.Tensor, float]:
    """A mean over some of the samples: now and then, over none."""
    chosen = labels == 0
    return F.cross_entropy(model(inputs)[chosen], labels[chosen]), float(chosen.sum())


def count_other_things(worker: Any) -> None:
    model = worker.wrap(net())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for _ in worker.epochs(2):
        for batch in worker.batches(data()):
            with worker.step():
                for inputs, labels, _ in worker.micro_batches(batch):
                    worker.backward(model(inputs).square().mean(), count=len(inputs))
                    loss, count = masked(model, inputs, labels)
                    worker.backward(loss, count=count, of="zeros")


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        ("cpu*1", {"micro_batch": 3}),
        ("cpu*2", {"batches": [23, 1], "micro_batch": 6}),
        ("cpu*3", {"batches": [0, 20, 4]}),
    ],
    ids=str,
)
def test_each_named_mean_has_its_own_denominator(devices, settings):
    torch.manual_seed(SEED)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _, (inputs, labels, _) in steps(2):
        optimizer.zero_grad()
        (model(inputs).square().mean() + masked(model, inputs, labels)[0]).backward()
        optimizer.step()
    every, _ = train_all(count_other_things, devices, **settings)
    assert relative(every[0], flat(model)) < 1e-12


def count_too_few(worker: Any) -> None:
    model = worker.wrap(net())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in worker.epochs(1):
        for inputs, labels, _ in worker.batches(data()):
            with worker.step():
                loss, count = masked(model, inputs, labels)
                worker.backward(loss, count=count)


def test_a_mean_over_something_else_must_be_named():
    with hk.Session(count_too_few, devices="cpu*2", global_batch=GLOBAL_BATCH) as session:
        session.run()
        with pytest.raises(hk.TaskError, match=r'rank \d counted .* of="tokens"'):
            session.wait(WAIT_S)


# ── ranks that do different things ──


def break_early(worker: Any) -> None:
    classify_until(worker, lambda step: worker.rank == 1 and step == 3)


def step_twice(worker: Any) -> None:
    model = worker.wrap(net())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in worker.epochs(1):
        for inputs, labels, _ in worker.batches(data()):
            with worker.step():
                worker.backward(F.cross_entropy(model(inputs), labels), count=len(labels))
                optimizer.step()
                if worker.rank == 0 and worker.steps_done == 2:
                    optimizer.step()


def evaluate_alone(worker: Any) -> None:
    model = worker.wrap(net())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in worker.epochs(2):
        for inputs, labels, _ in worker.batches(data()):
            with worker.step():
                worker.backward(F.cross_entropy(model(inputs), labels), count=len(labels))
        if worker.rank == 0:
            worker.evaluate(data(), {"accuracy": accuracy})


def classify_until(worker: Any, ends: Any) -> None:
    model = worker.wrap(net())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in worker.epochs(2):
        for inputs, labels, _ in worker.batches(data()):
            with worker.step():
                worker.backward(F.cross_entropy(model(inputs), labels), count=len(labels))
            if ends(worker.steps_done):
                return


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (break_early, r"rank 0 steps optimizer 0 in step 3, rank 1 ends its loop in step 3"),
        (step_twice, r"rank 0 steps optimizer 0 in step 2, rank 1 steps optimizer 0 in step 3"),
        (evaluate_alone, r"rank 0 evaluates in step 5, rank 1 begins the batches of epoch 1"),
    ],
)
def test_ranks_that_do_different_things_say_so_at_once(loop, says):
    with hk.Session(loop, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.run()
        with pytest.raises(hk.TaskError, match=says):
            session.wait(WAIT_S)


def skip_a_batch(worker: Any) -> None:
    model = worker.wrap(net())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in worker.epochs(1):
        for _ in worker.batches(data()):
            pass


def leave_an_epoch(worker: Any) -> None:
    model = worker.wrap(net())
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in worker.epochs(2):
        for inputs, labels, _ in worker.batches(data()):
            with worker.step():
                worker.backward(F.cross_entropy(model(inputs), labels), count=len(labels))
            break


def share_a_parameter(worker: Any) -> None:
    model = worker.wrap(net())
    for _ in range(2):
        worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (skip_a_batch, "batch of step 0 was passed over"),
        (leave_an_epoch, "epoch 0 was left in step 1, before its end"),
        (share_a_parameter, "belongs to two optimizers"),
        (lambda worker: None, "there is nothing to do"),
        (lambda worker: next(worker.batches(data())), "inside `for epoch in"),
        (lambda worker: worker.backward(torch.ones(1), count=1), "inside `with worker.step"),
        (lambda worker: worker.wrap("net"), "takes a torch.nn.Module, not str"),
        (lambda worker: worker.keep(it=3), "it of type int cannot be kept"),
    ],
)
def test_what_a_loop_must_not_do(loop, says):
    with hk.Session(loop, devices="cpu*2", global_batch=GLOBAL_BATCH) as session:
        session.run()
        with pytest.raises(hk.TaskError, match=says):
            session.wait(WAIT_S)


def test_a_loop_takes_one_argument():
    for wrong in (lambda: None, lambda worker, more: None, nn.Linear, 3):
        with pytest.raises(hk.SettingsError, match="function of one argument"):
            hk.Session(wrong, devices="cpu*2")


# ── the controls ──


def end_at_7(worker: Any) -> None:
    classify_until(worker, lambda step: step == 7)


def test_a_loop_may_end_early_on_all_ranks():
    with hk.Session(end_at_7, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.run()
        session.wait(WAIT_S)
        assert session.state == "ready"
        assert session.call(lambda worker: worker.step) == [7, 7]
        assert len(session.ledger) == 1
        with pytest.raises(hk.SessionError, match="come to its end"):
            session.run()


def slow() -> Any:
    return hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=0.004)


def test_pause_step_resume_and_a_new_split_leave_the_maths(classified, until):
    with hk.Session(
        classify, devices=slow(), global_batch=GLOBAL_BATCH, seed=SEED, batches=[12, 12]
    ) as session:
        session.step(2)
        until(lambda: session.state == "paused")
        assert session.call(lambda worker: (worker.epoch, worker.step)) == [(0, 2)] * 2
        session.set(batches=[20, 4], micro_batch=3)
        session.step(5)
        until(lambda: session.state == "paused" and session.progress.step == 7)
        session.set(batches=[5.0, 1.0])
        session.resume()
        session.wait(WAIT_S)
        session.run()  # what was stepped into was one epoch; now the rest
        session.wait(WAIT_S)
        assert set(session.history.series("batch", rank=0)[1]) > {12, 20}
        assert relative(session.call(weights)[0], classified[0]) < 1e-12


def test_epochs_may_be_run_one_by_one(classified):
    with hk.Session(classify, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED) as session:
        for done in range(1, 4):
            session.run(epochs=1)
            session.wait(WAIT_S)
            assert len(session.ledger) == done
        assert relative(session.call(weights)[0], classified[0]) < 1e-12


def test_inline_epochs_and_steps_may_be_run_one_by_one(classified):
    with hk.Session(classify, devices="inline", global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.run(epochs=1)
        session.step(3)
        assert session.call(lambda worker: worker.step) == [8]
        session.run()
        assert relative(session.call(weights)[0], classified[0]) < 1e-12


def test_a_checkpoint_goes_on_elsewhere(classified, tmp_path, until):
    with hk.Session(classify, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.step(7)
        until(lambda: session.state == "paused")
        session.save(tmp_path / "loop.ckpt")
        assert session.call(lambda worker: worker.step) == [7, 7]
    with hk.Session.load(
        tmp_path / "loop.ckpt", classify, devices="cpu*3", batches=[1, 20, 3]
    ) as session:
        session.run()
        session.wait(WAIT_S)
        assert relative(session.call(weights)[0], classified[0]) < 1e-12


def test_after_a_death_the_loop_goes_on_from_the_last_epoch(classified):
    fleet = hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=1e-4, dies_at={"V100 #1": 8})
    with hk.Session(classify, devices=fleet, global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.run()
        session.wait(WAIT_S)
        assert any(event.kind == "recovery" for event in session.history.events)
        assert relative(session.call(weights)[0], classified[0]) < 1e-12


def test_closing_in_the_middle_unwinds_the_loop(until):
    session = hk.Session(classify, devices=slow(), global_batch=GLOBAL_BATCH, seed=SEED)
    session.step(1)
    until(lambda: session.state == "paused")
    session.close()
    assert session.state == "closed"


# ── what the settings do ──


def test_clipping_and_the_learning_rate_are_those_of_one_process():
    torch.manual_seed(SEED)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for number, (_, (inputs, labels, _)) in enumerate(steps(3)):
        if number and number % STEPS == 0:
            scheduler.step()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        own = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = own * 0.5
        optimizer.step()
        optimizer.param_groups[0]["lr"] = own

    def loop(worker: Any) -> None:
        model = worker.wrap(net())
        optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in worker.epochs(3):
            for inputs, labels, _ in worker.batches(data()):
                with worker.step():
                    worker.backward(F.cross_entropy(model(inputs), labels), count=len(labels))
            scheduler.step()

    every, _ = train_all(loop, "cpu*2", batches=[20, 4], clip_norm=0.05, lr="x0.5")
    assert relative(every[0], flat(model)) < 1e-12


def test_a_rule_for_the_learning_rate_follows_the_global_batch():
    with hk.Session(
        end_after_2, devices="cpu*2", global_batch=GLOBAL_BATCH, seed=SEED, lr_rule="linear"
    ) as session:
        session.run(epochs=1)
        session.wait(WAIT_S)
        session.set(global_batch=2 * GLOBAL_BATCH)
        session.run()
        session.wait(WAIT_S)
        assert [row.lr for row in session.ledger] == [0.1, 0.2]
        assert session.call(lambda worker: worker.optimizer.param_groups[0]["lr"]) == [0.1] * 2


def end_after_2(worker: Any) -> None:
    classify_until(worker, lambda step: False)


def test_a_value_that_one_rank_alone_logs_is_in_the_ledger():
    def loop(worker: Any) -> None:
        for _ in worker.epochs(1):
            for _ in worker.batches(data()):
                with worker.step():
                    pass
            if worker.rank == 1:
                worker.log(temperature=0.5)

    with hk.Session(loop, devices="cpu*2", global_batch=GLOBAL_BATCH) as session:
        session.run()
        session.wait(WAIT_S)
        assert session.ledger[0].metrics == {"temperature": 0.5}


def test_an_overflow_on_one_rank_makes_all_skip_the_step():
    def loop(worker: Any) -> None:
        model = worker.wrap(net().float())
        worker.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for _ in worker.epochs(1):
            for inputs, labels, _ in worker.batches(data()):
                with worker.step():
                    loss = F.cross_entropy(model(inputs.float()), labels)
                    if worker.rank == 1 and worker.steps_done == 2:
                        loss = loss * float("inf")
                    worker.backward(loss, count=len(labels))

    fleet = hk.emulate("A100 + V100", pace={"A100": 2.0}, sample_s=1e-4)
    with hk.Session(
        loop, devices=fleet, global_batch=GLOBAL_BATCH, seed=SEED, amp=["bf16", "fp16"]
    ) as session:
        session.run()
        session.wait(WAIT_S)
        skipped = [record.step for record in session.history.records_since(0) if record.skipped]
        assert skipped == [2]
        first, second = session.call(weights)
        assert torch.equal(first, second)
        assert torch.isfinite(first).all()
        assert session.call(lambda worker: worker.loss_scale) == [2.0**15] * 2


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_travels_through_the_same_codecs(compression):
    with hk.Session(
        classify, devices="cpu*2", global_batch=GLOBAL_BATCH, compression=compression
    ) as session:
        session.run()
        session.wait(WAIT_S)
        elements = sum(p.numel() for p in net().parameters())
        for record in session.history.records_since(0):
            # Two ranks send half of the gradient twice, in two bytes an element.
            assert [rank.wire_bytes for rank in record.ranks] == [2 * elements] * 2
        first, second = session.call(weights)
        assert torch.equal(first, second)


def test_the_balancer_gives_the_faster_device_more(classified):
    fleet = hk.emulate("1xA100 + 1xV100", pace={"A100": 3.0}, sample_s=4e-3)
    with hk.Session(classify, devices=fleet, global_batch=GLOBAL_BATCH, seed=SEED) as session:
        session.run()
        session.wait(WAIT_S)
        assert session.plan.batches[0] > session.plan.batches[1]
        assert all(row.emulated for row in session.ledger)
        assert relative(session.call(weights)[0], classified[0]) < 1e-12


def test_time_is_accounted_for_and_held_to_the_emulated_clock():
    fleet = hk.emulate("2xV100", pace={"V100": 1.0}, sample_s=2e-3, link="1MB/s")
    with hk.Session(
        play, devices=fleet, global_batch=GLOBAL_BATCH, seed=SEED, batches=[20, 4]
    ) as session:
        session.run()
        session.wait(WAIT_S)
        full = [
            record for record in session.history.records_since(0) if record.samples == GLOBAL_BATCH
        ]
        for record in full[1:]:
            slow, fast = record.ranks
            assert slow.compute_s >= 3 * 20 * 2e-3  # three passes: two of the critic's, one more
            assert fast.wait_s > slow.wait_s
            for rank in record.ranks:
                parts = rank.data_s + rank.compute_s + rank.wait_s + rank.transfer_s
                parts += rank.codec_s + rank.optimizer_s
                assert parts <= rank.step_s * 1.02
