import dataclasses
import math
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetkit as hk
from hetkit.devices.device import Device, DeviceSpec, Emulation, Link, SlowDown
from hetkit.launch import messages
from hetkit.launch.messages import AnyMessage, Grant, Hello, Leave, Message, decode, encode
from hetkit.plan import Plan
from hetkit.planning.time_split import Stamps

KINDS: tuple[type[Message], ...] = typing.get_args(AnyMessage)

COUNTS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
POSITIVE = st.floats(1e-9, 1e9)
LINKS = st.builds(Link, latency_s=st.floats(0, 9), bytes_per_s=POSITIVE | st.just(math.inf))
SLOW_DOWNS = st.builds(SlowDown, at_s=st.floats(0, 1e6), factor=POSITIVE)
EMULATIONS = st.builds(
    Emulation,
    pace=POSITIVE,
    sample_s=st.none() | POSITIVE,
    launch_s=st.floats(0, 9),
    amp_pace=st.dictionaries(st.text(max_size=4), POSITIVE, max_size=2),
    intra_link=LINKS,
    inter_link=LINKS,
    memory_bytes=st.none() | COUNTS,
    slow_downs=st.lists(SLOW_DOWNS, max_size=2).map(tuple),
    dies_at_step=st.none() | COUNTS,
)
SPECS = st.builds(
    DeviceSpec,
    name=st.text(max_size=9),
    vendor=st.text(max_size=3),
    fp32_flops=st.none() | POSITIVE,
    sources=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)
DEVICES = st.builds(
    Device,
    name=st.text(max_size=9),
    kind=st.sampled_from(["cpu", "cuda"]),
    index=st.integers(0, 63),
    key=st.text(max_size=9),
    uuid=st.none() | st.text(max_size=9),
    spec=st.none() | SPECS,
    emulation=st.none() | EMULATIONS,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batches = draw(st.lists(st.integers(0, 4096), min_size=1, max_size=8))
    first, steps = draw(st.integers(0, 10**9)), draw(st.integers(1, 10**6))
    return Plan(
        version=draw(COUNTS),
        epoch=draw(COUNTS),
        first_step=first + draw(st.integers(0, steps - 1)),
        epoch_first_step=first,
        epoch_steps=steps,
        global_batch=sum(batches),
        batches=tuple(batches),
        micro_batches=tuple(max(1, b) for b in batches),
        amp=("off",) * len(batches),
        compression=draw(st.text(max_size=8)),
        tf32=draw(st.booleans()),
        lr=draw(st.none() | POSITIVE),
        clip_norm=draw(st.none() | POSITIVE),
        bucket_bytes=draw(st.none() | COUNTS),
        reason=draw(st.text()),
    )


def values(hint: Any) -> st.SearchStrategy[Any]:
    """What a field with that type can hold; records that check themselves have their own."""
    own = {Device: DEVICES, Plan: plans(), float: FLOATS, int: COUNTS, bytes: st.binary()}
    if hint in own:
        return own[hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and inside[-1:] == (...,):
        return st.lists(values(inside[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inside))
    if origin is dict:
        return st.dictionaries(*map(values, inside), max_size=3)
    if inside:  # a union
        return st.one_of(*map(values, inside))
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, Message)):
        return built(hint)
    return st.from_type(hint)


def built(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_equal_and_of_its_type(kind: type[Message]) -> None:
    @given(built(kind))
    def comes_back(message: Message) -> None:
        back = decode(encode(message))
        assert type(back) is kind
        assert back == message

    comes_back()


def test_every_message_of_the_module_can_be_decoded() -> None:
    defined = {
        thing
        for thing in vars(messages).values()
        if isinstance(thing, type) and issubclass(thing, Message) and thing is not Message
    }
    assert defined - set(KINDS) == {messages.StepRow}, "a row travels inside Progress"


def test_a_loss_that_is_not_finite_travels() -> None:
    stamps = Stamps(start=0.0, end=1.0, cut=0.5, data_s=0.0, optimizer_s=0.1)
    losses = (math.nan, math.inf, -math.inf)
    rows = tuple(
        messages.StepRow(
            step=i,
            epoch=0,
            batch=8,
            micro_steps=1,
            stamps=stamps,
            loss_sum=loss,
            count=8.0,
            wire_bytes=0.0,
        )
        for i, loss in enumerate(losses)
    )
    back = decode(encode(messages.Progress(rank=0, generation=0, rows=rows)))
    assert [str(row.loss_sum) for row in back.rows] == [str(loss) for loss in losses]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(hk.ProtocolError, match=f"{len(wire)} bytes that are not a hetkit message"):
        decode(wire)


@given(st.data())
def test_a_damaged_message_is_refused_or_is_another_message(data: st.DataObject) -> None:
    wire = bytearray(encode(data.draw(built(data.draw(st.sampled_from(KINDS))))))
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    wire = wire[: data.draw(st.integers(0, len(wire)))]
    try:
        assert isinstance(decode(bytes(wire)), KINDS)
    except hk.ProtocolError:
        return


@pytest.mark.parametrize(
    "wire",
    [
        msgspec.msgpack.encode({"type": "Grant", "until": "soon"}),
        msgspec.msgpack.encode({"type": "Grant"}),
        msgspec.msgpack.encode({"type": "Shutdown"}),
        msgspec.msgpack.encode({"until": 3}),
        msgspec.msgpack.encode([1, 2]),
        encode(Grant(until=3)) + b"\0",
        b"\x82\xa4type\xa5Leave\xa1x" + b"\x91" * 100_000 + b"\xc0",
        b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    ],
    ids=["wrong type", "missing", "unknown", "untagged", "no map", "tail", "too deep", "pickle"],
)
def test_what_is_not_ours_is_refused(wire: bytes) -> None:
    with pytest.raises(hk.ProtocolError, match="bytes that are not a hetkit message"):
        decode(wire)


def test_a_plan_that_contradicts_itself_does_not_get_in() -> None:
    plan = {
        "version": 1, "epoch": 0, "first_step": 0, "epoch_first_step": 0, "epoch_steps": 1,
        "global_batch": 8, "batches": [4, 3], "micro_batches": [4, 3], "amp": ["off", "off"],
        "compression": "none",
    }  # fmt: skip
    with pytest.raises(hk.ProtocolError, match="do not sum to 8"):
        decode(msgspec.msgpack.encode({"type": "SetPlan", "plan": plan}))


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert decode(msgspec.msgpack.encode({"type": "Leave", "why": "later"})) == Leave()


def test_a_worker_says_which_protocol_it_speaks() -> None:
    hello = decode(encode(Hello(rank=0, generation=0, pid=1)))
    assert hello.protocol == messages.PROTOCOL
