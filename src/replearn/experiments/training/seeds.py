"""Seeds that depend on the position in a run alone, not on how it was reached."""

import hashlib


def seed_at(*place: int | str) -> int:
    """A 63-bit seed for a position such as (seed, epoch, step, "augment").

    So resumed, interleaved and distributed runs draw the same numbers as an uninterrupted run.
    """
    text = "/".join(str(part) for part in place)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
