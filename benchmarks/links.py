"""What each link costs: seconds to encode and decode one VGG16 update (FedPara, gamma 0.1), its bytes and its error.

    python benchmarks/links.py                  on the CPU, one thread
    python benchmarks/links.py --device cuda    the update on the GPU; random numbers are drawn on the host
    python benchmarks/links.py --scheme original --turns 3

"encode" makes the message's tensors, "decode" reads them back; joining and hashing bytes is left out, as inside one
process. "MB" is the length of the whole message. "error" is ||decoded - update||^2 / ||update||^2, of an update whose
numbers are normal with a different scale per tensor. The rows are measured in turns, in random order.
"""

import argparse
import platform
import random
import shutil
import subprocess
import time
from statistics import median

import torch

import fedpara as fp
from fedpara import models
from fedpara.engines.program import make_program
from fedpara.state import State
from fedpara.wire import Header, decode, make_message, spec_of

LINKS = (
    *("float32", "float16", "bfloat16", "int8", "int4", "int2", "ternary", "sign"),
    *("topk(0.1)", "topk(0.01)", "stc(0.01)", "eden", "eden(bits=2)", "eden(bits=4)", "grid(0.25)"),
    *("powersgd(rank=1)", "powersgd(rank=2)", "powersgd(rank=4)"),
)
HEADER = Header(1, "fedavg", "fedpara", "client:0", 500)


def update_of(scheme: str, device: torch.device) -> State:
    """A random update of VGG16 with the shapes of its shared tensors."""
    torch.manual_seed(0)
    model = models.build("vgg16", classes=10, shape=(3, 32, 32))
    if scheme == "fedpara":
        fp.factorize(model, fp.FedPara(gamma=0.1), models.rule("vgg16"))
    program = make_program(model)
    shapes = {name: program.initial[name].shape for name in program.shared}
    return {
        name: (torch.randn(shape) * 10 ** torch.empty(()).uniform_(-4, -2)).to(device)
        for name, shape in shapes.items()
    }


def measure(link: str, update: State, turn: int) -> tuple[float, float, int, float]:
    """(seconds to encode, seconds to decode, bytes, relative squared error)"""
    spec, generator = spec_of(update, link), torch.Generator().manual_seed(turn)
    on_gpu = next(iter(update.values())).is_cuda

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if on_gpu else time.process_time()

    started = now()
    message = make_message(update, HEADER, link, generator)
    encoded = now()
    _, state = decode(message, link=link, spec=spec)
    decoded = now()
    off = sum(float((state[name] - x).double().square().sum()) for name, x in update.items())
    norm = sum(float(x.double().square().sum()) for x in update.values())
    return encoded - started, decoded - encoded, len(message), off / norm


def processor() -> str:
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if shutil.which("lscpu") else ""
    model = [line.partition(":")[2].strip() for line in lscpu.splitlines() if line.startswith("Model name")]
    return " ".join(model) or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scheme", choices=("fedpara", "original"), default="fedpara")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    update = update_of(given.scheme, torch.device(given.device))
    numbers = sum(tensor.numel() for tensor in update.values())
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else processor()
    print(f"{where}, 1 thread; Python {platform.python_version()}, torch {torch.__version__}\n")
    print(f"One update of VGG16, {given.scheme}: {len(update)} tensors, {numbers:,} numbers")
    print(f"CPU time; on a GPU elapsed time. Median (least) of {given.turns} turns\n")
    found: dict[str, list[tuple[float, float, int, float]]] = {link: [] for link in LINKS}
    for turn in range(given.turns + 1):
        for link in random.sample(LINKS, len(LINKS)):
            measured = measure(link, update, turn)
            found[link] += [measured] if turn else []  # the first turn warms up
    print("| link | encode [ms] | decode [ms] | MB | bits per number | times fewer | error |")
    print("|---|---|---|---|---|---|---|")
    exact = found["float32"][0][2]
    for link, turns in found.items():
        encode, decode_, bytes_, error = zip(*turns, strict=True)
        times = (f"{1e3 * median(part):.1f} ({1e3 * min(part):.1f})" for part in (encode, decode_))
        size = f"{bytes_[0] / 1e6:.3f} | {8 * bytes_[0] / numbers:.2f} | {exact / bytes_[0]:.1f}"
        print(f"| {link} | {' | '.join(times)} | {size} | {median(error):.4f} |")


if __name__ == "__main__":
    main()
