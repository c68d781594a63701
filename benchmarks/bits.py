"""Do two commits compute the same bits? 112 small experiments, each stopped after two rounds and resumed for a third.

    python benchmarks/bits.py --out before.json                 # in a checkout of one commit
    python benchmarks/bits.py --out after.json --against before.json

Two engines, seven algorithms, four schemes, two of three links each, on digits. The digest is of metrics.jsonl and of
the tensors of the final checkpoint. Use the same machine and the same number of threads: both decide the last bits.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fedpara.experiments import Experiment, resume, run

ENGINES = ("sequential", "batched")
ALGORITHMS = ("fedavg", "fedprox", "scaffold", "feddyn", "fedadam", "fedyogi", "fedadagrad")
SCHEMES = ("original", "lowrank", "fedpara", "pfedpara")
LINKS = (("float32", "float32"), ("float16", "float32"), ("int8", "int8"))


def experiments() -> dict[str, Experiment]:
    found = {}
    for number, (engine, algorithm, scheme) in enumerate(itertools.product(ENGINES, ALGORITHMS, SCHEMES)):
        for up, down in (LINKS[0], LINKS[1 + number % 2]):
            given: dict[str, Any] = {} if scheme == "original" else {"gamma": 0.1}
            found[f"{engine} {algorithm} {scheme} {up}/{down}"] = Experiment(
                dataset="digits",
                model="mlp",
                scheme=scheme,
                algorithm=algorithm,
                engine=engine,
                link_up=up,
                link_down=down,
                clients=8,
                cohort=4,
                rounds=2,
                lr=0.01,
                batch_size=32,
                personal=scheme == "pfedpara",
                seed=number,
                **given,
            )
    return found


def digest(experiment: Experiment) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run(experiment, path)
        resume(path, rounds=3)
        found = hashlib.sha256()
        for line in (path / "metrics.jsonl").read_text().splitlines():
            known = {name: value for name, value in json.loads(line).items() if name != "everyone"}
            found.update(json.dumps(known).encode())
        with safe_open(path / "checkpoint.safetensors", framework="pt") as file:
            for name in sorted(file.keys()):
                if name.startswith(("x/", "buffers/", "server/")):
                    found.update(name.encode() + file.get_tensor(name).contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    found = {name: digest(experiment) for name, experiment in experiments().items()}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.against:
        before = json.loads(given.against.read_text())
        odd = [name for name in found if found[name] != before.get(name)]
        print(f"{len(found) - len(odd)} of {len(found)} experiments have the same bits", *odd, sep="\n")
        sys.exit(bool(odd))


if __name__ == "__main__":
    main()
