"""What the nursery imports once, so that its workers need not."""

import gc
import importlib.util
import logging
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

log = logging.getLogger(__name__)

# torch._dynamo: otherwise each worker's first optimizer step imports it (EVIDENCE §1).
ONCE = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "numpy",
    "cloudpickle",
    "zmq",
    "hetkit.worker.rank",
)


def import_once() -> None:
    """Imports all of `ONCE`, and keeps it out of the garbage collector's way.

    Nothing of it becomes garbage, and a scan would touch, and so copy, every page in every worker.
    """
    gc.disable()
    for name in ONCE:
        import_module(name)
    gc.freeze()
    gc.enable()


def preload(names: tuple[str, ...]) -> None:
    """Imports installed modules; those that a user may edit are left to each worker.

    Raises:
        SystemExit: A module initialises the GPU, which no forked worker could use then.
    """
    for name in names:
        if name in sys.modules or not _is_installed(name):
            continue
        try:
            import_module(name)
        except Exception:
            log.exception("%s could not be preloaded; each worker tries by itself", name)
        if sys.modules["torch"].cuda.is_initialized():
            raise SystemExit(
                f"importing {name} initialises the GPU, which forked workers could not use then: "
                "leave it out of preload."
            )
    gc.freeze()


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin)
    homes = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    return "site-packages" in origin.parts or any(origin.is_relative_to(home) for home in homes)
