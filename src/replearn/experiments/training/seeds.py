"""Random numbers that depend on where a run is, never on how it got there."""

import hashlib


def seed_at(*place: int | str) -> int:
    """A 63-bit seed for a place such as (seed, epoch, step, "augment").

    Resumed, interleaved and distributed runs draw the same numbers as a run never stopped,
    because nothing carries over from one place to the next.
    """
    text = "/".join(str(part) for part in place)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
