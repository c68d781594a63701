"""The folder that `flwr run` takes: a pyproject.toml that names the two apps of the installed package.

The modules that an experiment references are copied into it, so that they travel to the nodes. Installed packages do
not travel. The folder lists no dependencies: Flower would download torch again, in its largest build, on every node.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from fedpara import __version__
from fedpara.apps.flower.run_config import defaults
from fedpara.errors import ConfigError
from fedpara.files import make_folder, write_bytes

SERVER, CLIENT = "fedpara_server", "fedpara_client"

TEMPLATE = """[project]
name = "fedpara-app"
version = "{version}"
description = "FedPara on Flower: the installed package is the app."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedpara"

[tool.flwr.app.components]
serverapp = "{server}:app"
clientapp = "{client}:app"

# Override any of these: flwr run . --run-config 'preset="quickstart" rounds=20'. Empty means unset.
[tool.flwr.app.config]
{config}
"""


def write_app(
    folder: Path,
    given: Mapping[str, str | int | float] | None = None,
    sources: Mapping[str, Path] | None = None,
) -> None:
    """Write the app into an empty or new folder, with `given` as its run config and copies of the `sources`."""
    make_folder(folder, cure="another place")
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose a new folder.")
    config = "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in {**defaults(), **(given or {})}.items()
    )
    project = TEMPLATE.format(version=__version__, server=SERVER, client=CLIENT, config=config)
    write_bytes(folder / "pyproject.toml", project.encode())
    for name, module in ((SERVER, "server_app"), (CLIENT, "client_app")):
        code = f'"""The app of the installed package."""\n\nfrom fedpara.apps.flower.{module} import app\n'
        write_bytes(folder / f"{name}.py", f'{code}\n__all__ = ["app"]\n'.encode())
    for relative, source in (sources or {}).items():
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / relative, source.read_bytes())


def write_home(home: Path, port: int, certificate: Path | None = None) -> None:
    """Write Flower's own config: one connection, called `federation`."""
    trust = f'root-certificates = "{certificate}"' if certificate else "insecure = true"
    text = f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\naddress = "127.0.0.1:{port}"\n{trust}\n'
    home.mkdir(parents=True, exist_ok=True)
    write_bytes(home / "config.toml", text.encode())
