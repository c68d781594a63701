"""nodes.toml: which clients the holder of each node key may serve. The server reads it; nodes never see it.

[[node]]
key = "ecdsa-sha2-nistp384 AAAA..."   # the content of node-0.pub
client = 0                            # as in that node's --node-config: the clients 0, 3, 6, ...
clients = 3
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedpara.engines.roster import Keys
from fedpara.errors import ConfigError, MissingExtraError, install

FILE = "nodes.toml"
ABOUT = """# Which clients the holder of each node key may serve: client = k, clients = n means k, k + n, k + 2n, ...
# The server reads this file where the run config names it: keys="/etc/fedpara/nodes.toml"
"""


def keys_text(public: Sequence[str]) -> str:
    """The file for these keys, in OpenSSH's format: the first is number 0 of as many as there are."""
    nodes = [
        f'\n[[node]]\nkey = "{key.strip()}"\nclient = {i}\nclients = {len(public)}\n'
        for i, key in enumerate(public)
    ]
    return "".join([ABOUT, *nodes])


def read_keys(path: Path) -> Keys:
    try:
        nodes = tomllib.loads(path.read_text(encoding="utf-8"))["node"]
        read = [_entry(path, entry) for entry in nodes]
    except OSError as error:
        raise ConfigError(f"the keys file {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the keys file {path} cannot be read ({error}): expected a [[node]] table with key, client and clients "
            "for each node, as `fedpara flower certs` writes it."
        ) from None
    keys = dict(read)
    if len(keys) < len(read):
        raise ConfigError(f"the keys file {path} lists a key twice: expected each key once.")
    return keys


def _entry(path: Path, entry: dict[str, Any]) -> tuple[bytes, tuple[int, int]]:
    key, k, n = entry["key"], entry["client"], entry["clients"]
    if type(k) is not int or type(n) is not int or not 0 <= k < n:
        raise ConfigError(
            f"the keys file {path} says client = {k!r}, clients = {n!r}: expected whole numbers, such as client = 0 "
            "and clients = 3."
        )
    return _as_flower_has_it(key), (k, n)


def _as_flower_has_it(key: str) -> bytes:
    """The public key in PEM, which is how a SuperLink stores it."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise MissingExtraError(f"node keys need the package cryptography: {install('flower')}") from None
    try:
        loaded = serialization.load_ssh_public_key(key.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(error) from None
    return loaded.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
