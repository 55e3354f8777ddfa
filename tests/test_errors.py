import inspect
import re

import pytest

import hetkit as hk
from hetkit import errors

OURS = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Class name to (parent, builtin base), as the module's docstring draws them."""
    found: dict[str, tuple[str, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"^    ([│ ├└─]*)(\w+)(?: \((\w+)\))?(?: +\S|$)", line)
        if drawn is None:
            continue
        depth = len(drawn[1]) // 4
        path[depth:] = [drawn[2]]
        found[drawn[2]] = (path[depth - 1] if depth else "Exception", drawn[3])
    return found


def test_the_drawing_is_the_tree() -> None:
    drawn = drawn_tree()
    assert drawn.keys() == OURS.keys()
    for name, (parent, builtin) in drawn.items():
        bases = [base.__name__ for base in OURS[name].__bases__]
        assert bases == [parent, *([builtin] if builtin else [])], name


def test_every_error_is_public_and_says_when_it_is_raised() -> None:
    for name, kind in OURS.items():
        assert getattr(hk, name) is kind
        assert name in hk.__all__
        assert inspect.getdoc(kind)


@pytest.mark.parametrize("name", sorted(OURS))
def test_one_except_clause_catches_them_all(name: str) -> None:
    with pytest.raises(hk.HetkitError, match="what was wrong"):
        raise OURS[name]("what was wrong")
