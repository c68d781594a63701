"""What traffic costs, in time and energy.

t = t_comp + t_comm,  t_comm = bytes both ways / network speed        (appendix D.1, "Training time")
E = bits * joules per bit                                             (Figure 3g)
"""

from fedpara.errors import UsageError

PAPER_MEGA = float(2**20)
JOULES_PER_BIT = 2.87e-6


def communication_seconds(bytes_: int, mbps: float, mega: float = 1e6) -> float:
    """t_comm of `bytes_` (both directions together) at `mbps` megabits per second.

    A megabit is 10^6 bits. The paper's table divides sizes in MiB by Mbps / 8, so its megabit is 2^20 bits:
    mega=PAPER_MEGA reproduces it. With 1,545,442 float32 parameters that gives 47.16, 9.43 and 1.89 s at 2, 10 and 50
    Mbps (printed: 47.2, 9.44, 1.88). With 15,253,578 it gives 465.5, 93.10 and 18.62 s (printed: 470.2, 94.04, 18.61).
    The printed 470.2 and 94.04 do not agree with the printed 18.61. Nor does 94.04 agree with its own total: 94.68 s
    less 1.64 s of computation is 93.04. Megabits of 10^6 would give 488.1, 97.62 and 19.52 s.
    """
    if not mbps > 0:
        raise UsageError(f"a network of {mbps} Mbps: expected a positive speed.")
    return 8 * bytes_ / (mbps * mega)


def round_seconds(compute: float, bytes_: int, mbps: float, mega: float = 1e6) -> float:
    """t = t_comp + t_comm"""
    return compute + communication_seconds(bytes_, mbps, mega)


def energy_joules(bytes_: int, joules_per_bit: float = JOULES_PER_BIT) -> float:
    """E of `bytes_` between users and a data center.

    The default of 2.87 microjoules per bit is derived from the paper's Figure 3(g). The figure labels twelve bars with
    GB and MJ, by the user-to-data-center model of Yan et al. (Energies 12(1):184, 2019), but does not state the
    constant. Together the twelve labels allow 24.59 to 24.73 kJ per GB, where a GB is 2^30 bytes (CIFAR-10 IID, gamma
    0.1: 110 rounds x 16 clients x 2 x 1,545,442 x 4 bytes = 20.27 GiB, printed 20.3): 2.863 to 2.879 microjoules.
    The model describes phones on LTE; pass `joules_per_bit` for other networks.
    """
    if joules_per_bit < 0:
        raise UsageError(f"{joules_per_bit} joules per bit: expected 0 or more.")
    return 8 * bytes_ * joules_per_bit
