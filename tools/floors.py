"""Keep the floors: a module imports from lower floors and from siblings, never upwards, and no imports go in a circle.

    python tools/floors.py        prints what breaks the rule, and exits with 1 if anything does
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FLOORS: Mapping[str, int] = {
    "infinity.kinds": 0,
    "infinity.errors": 0,
    "infinity.home": 0,
    "infinity.sizes": 0,
    "infinity.timeline": 0,
    "infinity._native": 0,
    "infinity.native": 0,
    "infinity.device": 0,
    "infinity.functions": 1,
    "infinity.config": 1,
    "infinity.storage": 2,
    "infinity.sharding": 3,
    "infinity.workload": 3,
    "infinity.optim": 4,
    "infinity.runtime": 5,
    "infinity.checkpoint": 5,
    "infinity.planner": 5,
    "infinity.run_state": 6,
    "infinity.alike": 6,
    "infinity.assembly": 6,
    "infinity.planning": 6,
    "infinity.preparation": 6,
    "infinity.engine": 6,
    "infinity.doctor": 6,
    "infinity.tune": 6,
    "infinity.replay": 6,
    "infinity": 6,
    "infinity.cli": 7,
    "infinity.__main__": 7,
}
"""The longest prefix of a module's name gives its floor. `infinity` itself is the front door: it only re-exports the engine."""


def floor_of(module: str) -> int | None:
    """The module's floor; None for a part of the package that the table does not name."""
    names = module.split(".")
    for length in range(len(names), 1, -1):
        if (floor := FLOORS.get(".".join(names[:length]))) is not None:
            return floor
    return FLOORS.get(module)


def modules(package: Path) -> dict[str, Path]:
    """Module name -> file, for every Python file of the package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        names = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(module: str, path: Path, known: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(imported module of the package, line) for each import statement, wherever it stands in the file.

    Imports for types alone (`if TYPE_CHECKING`) count: a type from above is knowledge of above.
    """
    known = set(known)
    root = module.partition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.partition(".")[0] == root)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, path, node)
            if base.partition(".")[0] == root:
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    yield (name if name in known or name in FLOORS else base), node.lineno


def _absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    """`from ..sizes import x` in infinity.storage.store -> infinity.sizes."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def violations(package: Path) -> Iterator[str]:
    """One sentence for each import that goes up, each module without a floor, and the first circle."""
    found = modules(package)
    graph: dict[str, set[str]] = {}
    for module, path in found.items():
        mine = floor_of(module)
        if mine is None:
            yield f"{path}: {module} is on no floor: add it to FLOORS in tools/floors.py"
            continue
        graph[module] = set()
        for target, line in imports(module, path, found):
            theirs = floor_of(target)
            if theirs is not None and theirs > mine:
                yield f"{path}:{line}: {module} (floor {mine}) imports {target} (floor {theirs}): pass a value or a callable down instead"
            if target != module and target in found:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"imports go in a circle: {' -> '.join(reversed(error.args[1]))}"


def main() -> int:
    problems = list(violations(Path(__file__).resolve().parent.parent / "infinity"))
    print("\n".join(problems) or "floors: every import goes down")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
