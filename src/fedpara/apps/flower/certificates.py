"""Certificates and node keys of a federation.

ca.crt  ca.key           the federation's certificate authority; store its key offline afterwards
server.pem  server.key   the SuperLink's certificate, for the names by which nodes reach it
node-0  node-0.pub       a key pair per node; register the public key with the SuperLink
nodes.toml               which clients each node key may serve; only the server reads it:

    [[node]]
    key = "ecdsa-sha2-nistp384 AAAA..."   # the content of node-0.pub
    client = 0                            # this node serves the clients 0, 3, 6, ...
    clients = 3
"""

import os
import re
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fedpara.apps.flower.run_config import served
from fedpara.engines.flower.roster import Keys
from fedpara.errors import ConfigError, MissingExtraError, install

FILE = "nodes.toml"
ABOUT = """# Which clients the holder of each node key may serve: client = k, clients = n means k, k + n, k + 2n, ...
# The server reads this file where the run config names it: keys="/etc/fedpara/nodes.toml"
"""
DAYS = 825
PUBLIC = (".crt", ".pem", ".pub", ".toml")
LONGEST_COMMON_NAME = 64
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")


def make_certificates(folder: Path, hosts: Sequence[str], nodes: int) -> list[Path]:
    """Write all files, or none, into `folder`. Only their owner can read the private ones."""
    names = ["ca.crt", "ca.key", "server.pem", "server.key"]
    names += [*(f"node-{i}{end}" for i in range(nodes) for end in ("", ".pub")), FILE]
    existing = [name for name in names if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{folder / existing[0]} exists and is not overwritten: choose another folder.")
    contents = _contents(hosts, nodes)
    with ExitStack() as undo:  # leftover files would block the next call
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
            undo.callback(folder.rmdir)
        for name in names:
            handle = _new_file(folder / name, private=not name.endswith(PUBLIC))
            undo.callback((folder / name).unlink)
            with os.fdopen(handle, "wb") as file:
                file.write(contents[name])
        undo.pop_all()
    return [folder / name for name in names]


def _new_file(path: Path, private: bool) -> int:
    """A file descriptor. O_EXCL creates the file with its final permissions, never reusing an existing file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)


def _contents(hosts: Sequence[str], nodes: int) -> dict[str, bytes]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise MissingExtraError(f"certificates need the package cryptography: {install('flower')}") from None

    def private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
        return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def certificate(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("fedpara CA"))
        builder = builder.public_key(key).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=DAYS))

    def usage(signs: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not signs,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=signs,
            crl_sign=signs,
            encipher_only=False,
            decipher_only=False,
        )

    curve, pem = ec.SECP384R1(), serialization.Encoding.PEM
    ca_key, server_key = ec.generate_private_key(curve), ec.generate_private_key(curve)
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        certificate("fedpara CA", ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    alternatives = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    # Clients verify the alternative names, which may be longer than a common name.
    common = hosts[0] if len(hosts[0]) <= LONGEST_COMMON_NAME else "fedpara server"
    server = (
        certificate(common, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    contents = {
        "ca.crt": ca.public_bytes(pem),
        "ca.key": private(ca_key, serialization.PrivateFormat.PKCS8),
        "server.pem": server.public_bytes(pem),
        "server.key": private(server_key, serialization.PrivateFormat.PKCS8),
    }
    for i in range(nodes):
        key = ec.generate_private_key(curve)
        contents[f"node-{i}"] = private(key, serialization.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        contents[f"node-{i}.pub"] = public + b"\n"
    contents[FILE] = keys_text([contents[f"node-{i}.pub"].decode() for i in range(nodes)]).encode()
    return contents


def _general_name(host: str):  # type: ignore[no-untyped-def]
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ip_address(host))
    if not _NAME.fullmatch(host):
        raise ConfigError(
            f"--host {host!r}: expected an IP address or an ASCII name, such as fl.example.org."
        )
    return x509.DNSName(host)


def keys_text(public: Sequence[str]) -> str:
    """The text of nodes.toml for these OpenSSH keys: key i serves client i of every `len(public)`."""
    nodes = [
        f'\n[[node]]\nkey = "{key.strip()}"\nclient = {i}\nclients = {len(public)}\n'
        for i, key in enumerate(public)
    ]
    return "".join([ABOUT, *nodes])


def read_keys(path: Path) -> Keys:
    """The clients that each public key may serve, from nodes.toml. ConfigError unless every entry is valid."""
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
    where = f"the keys file {path} (client, clients)"
    numbers = served(entry["client"], entry["clients"], where)
    return _to_pem(entry["key"]), numbers


def _to_pem(key: str) -> bytes:
    """The OpenSSH public key as PEM, the format in which a SuperLink stores it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        loaded = serialization.load_ssh_public_key(key.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(error) from None
    return loaded.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
