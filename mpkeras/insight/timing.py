"""Taking turns, so that what slows the machine down for a moment slows everything that is timed."""

import random
from collections.abc import Sequence


def orders_in_turn(names: Sequence, rounds: int, seed: int = 0) -> list[list]:
    """Returns one order of `names` for each of `rounds` rounds.

    Every block of `len(names)` rounds holds the rotations of one random order, so that each name comes first, second,
    ... equally often: the first of a round may pay for what the last one left in the caches.
    """
    shuffle = random.Random(seed).shuffle
    orders: list = []
    while names and len(orders) < rounds:
        order = list(names)
        shuffle(order)
        orders += [order[start:] + order[:start] for start in range(len(order))]
    return orders[:rounds]
