"""What the ranks tell each other without a collective: through the store where they meet, by names, as JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from hybridflow.errors import DeadlineError


@dataclass(frozen=True)
class Board:
    """Values under names.

    Attributes:
        store: Where they lie.
    """

    store: Store

    def put(self, name: str, value: Any) -> None:
        """Publish a value under a name."""
        self.store.set(f"doctor/{name}", json.dumps(value))

    def get(self, name: str, deadline_s: float) -> Any:
        """Return the value under a name.

        Raises:
            DeadlineError: Nothing was, in time.
        """
        try:
            self.store.wait([f"doctor/{name}"], timedelta(seconds=max(deadline_s, 0.001)))
        except RuntimeError as error:
            raise DeadlineError(
                f"doctor --nodes: nothing came under {name!r} within {deadline_s:.0f} s; the first node, which gathers "
                "what all find, is gone or very slow: leave it out with --exclude, or look at it first"
            ) from error
        return json.loads(self.store.get(f"doctor/{name}"))

    def collect(self, names: Mapping[int, str], deadline_s: float) -> dict[int, Any]:
        """Return the values that ranks have published under their names in time; the others are absent."""
        end, found = time.monotonic() + deadline_s, {}
        for rank, name in names.items():
            with contextlib.suppress(DeadlineError):
                found[rank] = self.get(name, end - time.monotonic())
        return found
