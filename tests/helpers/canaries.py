"""A lower bound on epsilon from what an attacker finds with a canary: a client that sends as much as it may."""

import numpy as np
from scipy.stats import beta


def bounds(hits, of, confidence=0.99):
    """Clopper and Pearson's interval of a probability."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else beta.ppf(tail, hits, of - hits + 1)
    high = 1.0 if hits == of else beta.ppf(1 - tail, hits + 1, of - hits)
    return low, high


def empirical(without, with_canary, delta):
    """A lower bound on epsilon: whoever sees the models and decides by a threshold."""
    half = len(without) // 2

    def of(a, b, threshold):
        found = bounds((b > threshold).sum(), len(b))[0] - delta, bounds((a > threshold).sum(), len(a))[1]
        return np.log(max(found[0], 1e-12) / found[1])

    tried = np.quantile(np.concatenate([without[:half], with_canary[:half]]), np.linspace(0.02, 0.98, 49))
    best = max(tried, key=lambda t: of(without[:half], with_canary[:half], t))
    return of(without[half:], with_canary[half:], best)
