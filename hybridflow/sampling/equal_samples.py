"""Which samples are equal. A model gives them numbers that are equal but for rounding.

Where they lie in a micro-batch, and in which one, depends on the layout, and so does the rounding. What divides by the
spread of such numbers, or asks whether they differ, needs the same number for each.
"""

from __future__ import annotations

import hashlib

from hybridflow.dataflow.batch import Batch


def keys_of(batch: Batch, *columns: str) -> list[str]:
    """Return a key for each sample, equal where these ragged columns are equal."""
    found = [hashlib.sha256() for _ in range(len(batch))]
    for name in columns:
        for key, row in zip(found, batch.ragged(name).to_list(), strict=True):
            key.update(row.cpu().numpy().tobytes())
    return [key.hexdigest()[:32] for key in found]
