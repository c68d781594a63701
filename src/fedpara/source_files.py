"""The source files behind references, for digests and for Flower apps.

These are every .py file of the module's top-level package, or the file of a single module, and the modules beside it
that they import. Tests (test_*.py and *_test.py) are left out. Of an installed package, only its own files count.
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fedpara import references

INSTALLED = ("site-packages", "dist-packages")
OURS = "fedpara"


def source_digests(texts: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each source file of these references, by its path in the folder that holds the package."""
    files = {name: path for text in texts for name, path in _files(text).items()}
    return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in sorted(files)}


def combined_digest(texts: Iterable[str]) -> str:
    """One digest of all source files; "" without references."""
    found = source_digests(texts)
    return hashlib.sha256(json.dumps(found).encode()).hexdigest() if found else ""


def portable_files(texts: Iterable[str]) -> dict[str, Path]:
    """The source files that an app must contain. Installed packages must be installed on the other machine too."""
    found: dict[str, Path] = {}
    for text in texts:
        top, root = _location(text)
        if root is not None and top != OURS and not _is_installed(root):
            found |= _files(text)
    return found


def _files(text: str) -> dict[str, Path]:
    top, root = _location(text)
    if root is None:
        return {}
    found: dict[str, Path] = {}
    left, seen = [top], {top, OURS}
    while left:
        files = list(_files_of(root, left.pop()))
        found |= {path.relative_to(root).as_posix(): path for path in files}
        if not _is_installed(root):
            beside = {name for path in files for name in _imports(path)} - seen
            left += sorted(beside)
            seen |= beside
    return found


def _location(text: str) -> tuple[str, Path | None]:
    """The top-level module and the folder that holds it. None for a module without files."""
    references.find(text)
    top = references.parse(text).module.partition(".")[0]
    module = sys.modules[top]
    if places := list(getattr(module, "__path__", ())):
        return top, Path(places[0]).parent
    file = getattr(module, "__file__", None)
    return top, Path(file).parent if file else None


def _files_of(root: Path, name: str) -> Iterator[Path]:
    single, package = root / f"{name}.py", root / name
    if single.is_file() and not (package / "__init__.py").is_file():
        return iter([single])
    return (path for path in sorted(package.rglob("*.py")) if not _is_test(path))


def _is_test(path: Path) -> bool:
    """Flower leaves such files out of an app."""
    return path.name.startswith("test_") or path.name.endswith("_test.py")


def _imports(path: Path) -> set[str]:
    """The top-level modules that a file imports, wherever in the file."""
    found: set[str] = set()
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def _is_installed(root: Path) -> bool:
    return any(part in INSTALLED for part in root.parts) or root == Path(sysconfig.get_paths()["stdlib"])
