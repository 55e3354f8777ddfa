import dataclasses
import enum
import functools
import importlib
import os
import pickle
import queue
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

import hetkit as hk
from hetkit.errors import PayloadError
from hetkit.launch.channel import Peer
from hetkit.launch.local import Exited, Output, WorkerStart
from hetkit.launch.payload import dump, dump_bytes, load, load_bytes

ENTRIES = Path(__file__).parent / "entries"
WAIT_S = 60


def round_trip(thing, folder):
    return load(dump(thing, folder).path)


def in_main(script, *arguments, folder, stdin=b""):
    """Runs a script as a kernel's ``__main__`` would be."""
    (folder / "kernel.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(folder / "kernel.py"), *arguments],
        input=stdin,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


# ── arrays and tensors ──

ARRAYS = {
    "plain": np.arange(100_000, dtype=np.float32).reshape(100, 1000),
    "fortran": np.asfortranarray(np.arange(40_000.0).reshape(200, 200)),
    "strided": np.arange(100_000)[::2],
    "permuted": np.arange(64_000.0).reshape(10, 20, 320).transpose(0, 2, 1),
    "reversed": np.arange(50_000)[::-1],
    "bool": np.arange(100_000) % 3 == 0,
    "structured": np.zeros(20_000, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.arange(20_000).astype("datetime64[s]"),
    "objects": np.array([{"a": 1}, None], dtype=object),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(1.5),
    "small": np.arange(5),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_equal_and_writable(name, tmp_path):
    array = ARRAYS[name]
    back = round_trip({"x": array}, tmp_path)["x"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    if array.size and array.dtype != object:
        back[...] = np.zeros((), array.dtype)
        assert np.array_equal(load(next(tmp_path.glob("*.task")))["x"], array)


TENSORS = {
    "plain": torch.arange(100_000.0).reshape(100, 1000),
    "bf16": torch.arange(100_000).to(torch.bfloat16),
    "fp16": torch.arange(100_000).to(torch.float16),
    "float8": torch.arange(200_000).to(torch.float8_e4m3fn),
    "bool": torch.arange(100_000) % 3 == 0,
    "complex": torch.arange(20_000) * (1 + 2j),
    "conjugate": (torch.arange(20_000) * (1 + 2j)).conj(),
    "negative": (torch.arange(20_000) * (1 + 2j)).conj().imag,
    "strided": torch.arange(100_000)[::2],
    "transposed": torch.arange(40_000.0).reshape(100, 400).T,
    "channels_last": torch.rand(4, 3, 64, 64).to(memory_format=torch.channels_last),
    "slice": torch.arange(100_000)[10:20],
    "expanded": torch.arange(10.0).expand(1000, 10),
    "grad": torch.arange(100_000.0).requires_grad_(),
    "parameter": torch.nn.Parameter(torch.arange(100_000.0)),
    "small": torch.arange(5),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(1.5),
    "sparse": torch.eye(10).to_sparse(),
    "meta": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_as_they_were(name, tmp_path):
    tensor = TENSORS[name]
    back = round_trip([tensor], tmp_path)[0]
    assert type(back) is type(tensor)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.requires_grad == tensor.requires_grad
    assert back.layout == tensor.layout
    if tensor.device.type == "meta":
        return
    if tensor.layout is torch.strided:
        assert back.stride() == tensor.stride()
    assert torch.equal(_dense(back), _dense(tensor))


def _dense(tensor):
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor.resolve_neg()


def test_tensors_that_share_memory_go_on_sharing_it(tmp_path):
    whole = torch.arange(200_000.0)
    task = {"train": whole[:150_000], "test": whole[150_000:], "whole": whole}
    payload = dump(task, tmp_path)
    assert payload.size_bytes < 1.1 * whole.nbytes
    back = load(payload.path)
    back["whole"][0] = -1.0
    back["whole"][-1] = -2.0
    assert back["train"][0] == -1.0
    assert back["test"][-1] == -2.0


def test_a_module_with_tied_weights_stays_tied(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    model[1].weight = model[0].weight
    back = round_trip(model, tmp_path)
    assert back[1].weight is back[0].weight
    assert torch.equal(back[0].weight, model[0].weight)
    assert back[0].weight.requires_grad
    back(torch.rand(3, 200)).sum().backward()


def test_the_same_array_stays_the_same(tmp_path):
    array = np.zeros(100_000)
    back = round_trip([array, array], tmp_path)
    assert back[0] is back[1]


def test_a_mapped_file_travels_by_name(tmp_path):
    file = tmp_path / "data.npy"
    np.save(file, np.arange(1_000_000.0))
    mapped = np.load(file, mmap_mode="r")
    payload = dump({"data": mapped}, tmp_path / "session")
    assert payload.size_bytes < 10_000
    back = load(payload.path)["data"]
    assert isinstance(back, np.memmap)
    assert np.array_equal(back, mapped)
    part = dump({"data": mapped[1000:50_000]}, tmp_path / "session")
    assert np.array_equal(load(part.path)["data"], mapped[1000:50_000])
    os.utime(file, ns=(1, 1))
    assert dump({"data": mapped}, tmp_path / "session").digest != payload.digest


def test_large_memory_is_aligned_and_outside_the_pickle(tmp_path):
    task = [np.ones(65_537 + i, dtype=np.uint8) for i in range(5)]
    payload = dump(task, tmp_path)
    assert Path(payload.path).stat().st_size < 5000
    for array in load(payload.path):
        assert array.__array_interface__["data"][0] % 64 == 0
        assert array.sum() == array.size


# ── the files ──


def test_files_are_private(tmp_path):
    payload = dump(np.zeros(100_000), tmp_path / "session")
    assert stat.S_IMODE((tmp_path / "session").stat().st_mode) == 0o700
    files = sorted((tmp_path / "session").iterdir())
    assert [path.suffix for path in files] == [".arrays", ".task"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    payload.remove()
    payload.remove()
    assert list((tmp_path / "session").iterdir()) == []


def test_a_file_that_others_may_write_is_not_opened(tmp_path):
    payload = dump([1], tmp_path)
    os.chmod(payload.path, 0o666)
    with pytest.raises(PayloadError, match="writable by others"):
        load(payload.path)


def test_a_file_that_is_no_payload_is_refused(tmp_path):
    (tmp_path / "x.task").write_bytes(b"\xc1")
    with pytest.raises(PayloadError, match="not a hetkit payload"):
        load(tmp_path / "x.task")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PayloadError, match="TMPDIR"):
        dump([1], tmp_path / "file")


# ── the digest ──


def test_an_unchanged_task_has_an_equal_digest_and_is_written_once(tmp_path):
    script = """
import sys, torch, numpy, dataclasses, enum, functools
from pathlib import Path
from hetkit.launch.payload import dump

class Mode(enum.Enum):
    A = 1

@dataclasses.dataclass
class Options:
    width: int = 3
    mode: Mode = Mode.A

class Net(torch.nn.Module):
    options = Options()
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(self.options.width, 300)
    def forward(self, x):
        return self.layer(x) * SCALE

SCALE = 2.0
X = torch.rand(1000, 300)
Y = numpy.arange(100)
def metric(model, batch, *, k=5):
    return {name: model(batch) for name in ("a", "b")}
task = [Net, lambda m, b: m(b).mean() * SCALE, X, Y, Net(), functools.partial(metric, k=3), metric]
folder = Path(sys.argv[1])
first = dump(task, folder)
files = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
Net()(X[:, :3])
assert dump(task, folder).digest == first.digest
assert dump(list(task), folder).digest == first.digest
assert files == {p: p.stat().st_mtime_ns for p in folder.iterdir()}
def changed(what):
    digest = dump(task, folder).digest
    assert digest != first.digest, what
SCALE = 3.0
changed("global")
SCALE = 2.0
assert dump(task, folder).digest == first.digest
X[500, 7] += 1
changed("one value of a tensor, in place")
X[500, 7] -= 1
Y[3] = 0
changed("one value of an array, in place")
Y[3] = 3
Net.forward = lambda self, x: x
changed("a method")
"""
    in_main(script, str(tmp_path / "s"), folder=tmp_path)


def test_rows_shuffled_in_place_are_other_data(tmp_path):
    data = np.arange(1_000_000.0).reshape(-1, 10)
    first = dump(data, tmp_path)
    np.random.default_rng(0).shuffle(data)
    assert dump(data, tmp_path).digest != first.digest


# ── by value ──


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Writes and imports a module beside the notebook."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write(text, name="hetkit_local"):
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        module = sys.modules.get(name)
        return importlib.reload(module) if module else importlib.import_module(name)

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("hetkit_local"):
            del sys.modules[name]


def elsewhere(payload, expression, folder):
    """Evaluates an expression of ``task`` where the local modules cannot be imported."""
    script = (
        "import sys; from hetkit.launch.payload import load\n"
        "task = load(sys.argv[1]); print(eval(sys.argv[2]))"
    )
    (folder / "elsewhere").mkdir(exist_ok=True)
    return in_main(script, payload.path, expression, folder=folder / "elsewhere").decode().strip()


def test_functions_of_a_local_module_travel_by_value(local, tmp_path):
    module = local("FACTOR = 2\nclass Net:\n    def run(self, x):\n        return FACTOR * x\n")
    payload = dump(module.Net, tmp_path / "s")
    assert elsewhere(payload, "task().run(21)", tmp_path) == "42"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_an_edited_and_reloaded_module_takes_effect(local, tmp_path):
    module = local("def loss(x):\n    return x + 1\n")
    first = dump(module.loss, tmp_path / "s")
    os.utime(tmp_path / "hetkit_local.py", ns=(1, 1))
    module = local("def loss(x):\n    return x + 2  # edited\n")
    second = dump(module.loss, tmp_path / "s")
    assert first.digest != second.digest
    assert elsewhere(first, "task(1)", tmp_path) == "2"
    assert elsewhere(second, "task(1)", tmp_path) == "3"


def test_whole_modules_travel_even_in_circles(local, tmp_path):
    local("", name="hetkit_local")
    (tmp_path / "hetkit_local.py").unlink()
    del sys.modules["hetkit_local"]
    (tmp_path / "hetkit_local").mkdir()
    (tmp_path / "hetkit_local" / "__init__.py").write_text("from . import nets, parts\n")
    (tmp_path / "hetkit_local" / "parts.py").write_text(
        "import hetkit_local\nimport logging\nlog = logging.getLogger(__name__)\n"
        "def width():\n    return hetkit_local.nets.WIDTH\n"
    )
    (tmp_path / "hetkit_local" / "nets.py").write_text(
        "import hetkit_local.parts\nWIDTH = 7\n"
        "class Net:\n    def width(self):\n        return hetkit_local.parts.width()\n"
    )
    importlib.invalidate_caches()
    package = importlib.import_module("hetkit_local")
    payload = dump(lambda: package.nets.Net().width(), tmp_path / "s")
    assert elsewhere(payload, "task()", tmp_path) == "7"


def test_a_module_that_cannot_travel_is_imported_by_the_worker(local, tmp_path):
    module = local("import threading\nLOCK = threading.Lock()\nWORD = 'old'\n")

    def task():
        with module.LOCK:
            return module.WORD

    first = dump(task, tmp_path / "s")
    assert load(first.path)() == "old"
    os.utime(tmp_path / "hetkit_local.py", ns=(1, 1))
    assert dump(task, tmp_path / "s").digest != first.digest


def test_installed_modules_and_hetkit_travel_by_name(tmp_path):
    data = dump_bytes([torch.nn.Linear, hk.Settings, functools.reduce])
    assert len(data) < 200


def test_classes_of_every_kind_of_the_main_module_work_elsewhere(tmp_path):
    script = """
import dataclasses, enum, sys, typing
from pathlib import Path
from hetkit.launch.payload import dump
class Color(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Options:
    width: int = 3
    color: Color = Color.RED
class Pair(typing.NamedTuple):
    a: int
    b: int
class Slots:
    __slots__ = ("x",)
    def __init__(self): self.x = 5
class Base:
    def name(self): return "base"
class Child(Base):
    @property
    def both(self): return super().name() + " child"
    @classmethod
    def make(cls): return cls()
task = dict(fields=lambda: [f.name for f in dataclasses.fields(Options)], options=Options(4),
            pair=Pair(1, 2), slots=Slots(), child=Child.make, color=Color.RED)
print(dump(task, Path(sys.argv[1])).path)
"""
    path = in_main(script, str(tmp_path / "s"), folder=tmp_path).decode().strip()
    task = load(path)
    assert task["fields"]() == ["width", "color"]
    assert dataclasses.replace(task["options"], width=9).width == 9
    assert task["pair"].b == 2
    assert task["slots"].x == 5
    assert task["child"]().both == "base child"
    assert task["color"] is task["options"].color
    assert isinstance(task["color"], enum.Enum)


# ── what comes back ──


def test_an_exception_of_the_main_module_comes_back_as_the_same_class(tmp_path):
    script = """
import subprocess, sys
from hetkit.launch.payload import dump_bytes, load_bytes
COUNT = 0
class Trouble(Exception):
    hits = 0
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code
    def told(self):
        global COUNT
        COUNT += 1
        return f"{self} {self.code}"
def fail():
    Trouble.hits = 99
    raise Trouble("in the worker", 7)
worker = '''
import sys
from hetkit.launch.payload import dump_bytes, load_bytes
try:
    load_bytes(sys.stdin.buffer.read())()
except Exception as error:
    sys.stdout.buffer.write(dump_bytes(error))
'''
method = Trouble.told
done = subprocess.run([sys.executable, "-c", worker], input=dump_bytes(fail),
                      capture_output=True, check=True)
error = load_bytes(done.stdout)
try:
    raise error
except Trouble as caught:
    assert caught.told() == "in the worker 7"
assert type(error) is Trouble
assert Trouble.told is method and COUNT == 1, "the worker's copy replaced the kernel's method"
assert Trouble.hits == 0
print("good")
"""
    assert in_main(script, folder=tmp_path).strip() == b"good"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "data.csv"),
        UnicodeDecodeError("utf-8", b"abc", 0, 1, "why"),
        KeyError("key"),
        StopIteration(5),
        torch.cuda.OutOfMemoryError("too much"),
        hk.PlanError("a plan"),
        ExceptionGroup("two", [ValueError(1), KeyError(2)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_come_back(error):
    error.add_note("rank 1, step 3")
    back = load_bytes(dump_bytes(error))
    assert type(back) is type(error)
    assert (str(back), repr(back)) == (str(error), repr(error))
    assert back.__notes__ == ["rank 1, step 3"]


def test_results_come_back(tmp_path):
    weights = {"w": torch.arange(1000.0), "n": np.arange(100_000)}
    back = load_bytes(dump_bytes(weights))
    assert torch.equal(back["w"], weights["w"])
    back["n"][0] = 5


# ── what cannot travel ──

LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.inner = {"key": [1, LOCK]}

    def __call__(self, model, batch):
        return 0


class Slotted:
    __slots__ = ("handle",)

    def __init__(self):
        self.handle = LOCK


class ClassHolder:
    lock = LOCK

    def run(self):
        return self.lock


def uses_global(model, batch):
    return [LOCK for _ in batch]


def uses_default(model, batch, lock=LOCK):
    return lock


def uses_keyword(model, batch, *, lock=LOCK):
    return lock


def calls_another(model, batch):
    return uses_global(model, batch)


def closure():
    lock = LOCK
    return lambda model, batch: lock


def generator():
    yield 1


CULPRITS = [
    (uses_global, 'task.loss → global variable "LOCK" (type _thread.lock)'),
    (uses_default, "task.loss → default 0 (type _thread.lock)"),
    (uses_keyword, 'task.loss → default "lock" (type _thread.lock)'),
    (closure(), 'task.loss → closure variable "lock" (type _thread.lock)'),
    (
        calls_another,
        'task.loss → global variable "uses_global" → global variable "LOCK" (type _thread.lock)',
    ),
    (Holder(), "task.loss.inner['key'][1] (type _thread.lock)"),
    (Holder().__call__, "task.loss → its object.inner['key'][1] (type _thread.lock)"),
    (functools.partial(max, LOCK), "task.loss → argument 0 (type _thread.lock)"),
    (functools.partial(max, key=LOCK), 'task.loss → argument "key" (type _thread.lock)'),
    (ClassHolder().run, "task.loss → its object → its class.lock (type _thread.lock)"),
    (lambda model, batch, s=Slotted(): s, "task.loss → default 0.handle (type _thread.lock)"),  # noqa: B008
]


@pytest.mark.parametrize(("loss", "message"), CULPRITS, ids=[m for _, m in CULPRITS])
def test_what_cannot_travel_is_named(loss, message, tmp_path):
    task = hk.Task(model=torch.nn.Linear, data=[1], loss=loss, optimizer=torch.optim.SGD)
    with pytest.raises(PayloadError, match=re.escape(message)) as caught:
        dump(task, tmp_path)
    assert "Create it inside the function" in str(caught.value)
    assert isinstance(caught.value.__cause__, (TypeError, pickle.PicklingError))
    assert list(tmp_path.iterdir()) == []
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_a_generator_is_named(tmp_path):
    with pytest.raises(PayloadError, match=r"data\[0\] \(type generator\)"):
        dump([generator()], tmp_path, name="data")


def test_endless_nesting_is_refused_in_time(tmp_path):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(PayloadError, match="recursion"):
        dump(nested, tmp_path)


def test_what_refuses_by_its_own_error_is_named(tmp_path):
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("never")

    with pytest.raises(PayloadError, match=r"Stubborn.*never"):
        dump({"a": Stubborn()}, tmp_path)


# ── shared by workers ──


def test_workers_share_one_copy_of_the_data(nursery, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ENTRIES))
    size_bytes, workers = 64 << 20, 3
    task = {
        "array": np.ones(size_bytes // 16, dtype=np.float64),
        "tensor": torch.ones(size_bytes // 8, dtype=torch.float32),
    }
    payload = dump(task, tmp_path)
    events, texts, exits = queue.SimpleQueue(), {}, 0
    for rank in range(workers):
        start = WorkerStart(
            session="share",
            peer=Peer(1, rank),
            folder=str(tmp_path),
            env={"HETKIT_TEST_PAYLOAD": payload.path, "HETKIT_TEST_WORKERS": str(workers)},
            entry="nursery_entries:share",
        )
        nursery.fork(start, events.put)
    while exits < workers:
        event = events.get(timeout=WAIT_S)
        exits += isinstance(event, Exited)
        if isinstance(event, Output):
            texts[event.peer.rank] = texts.get(event.peer.rank, "") + event.text
    pss_bytes = [int(text.split()[1]) for text in texts.values()]
    print(f"PSS of the mapped {size_bytes} bytes in {workers} workers: {pss_bytes}")
    assert [text.split()[0] for text in texts.values()] == ["good"] * workers
    assert sum(pss_bytes) <= 1.1 * size_bytes
