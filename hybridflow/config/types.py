"""Kinds of text and numbers that recipe keys share."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from hybridflow.sections import Bounds

Name = Annotated[str, re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")]


Plugin = Annotated[str, re.compile(r"[\w.]+:\w+")]


Variable = Annotated[str, re.compile(r"[A-Za-z_][A-Za-z0-9_]*")]


Score = Annotated[float, Bounds(low=-1e30, high=1e30)]


Server = Annotated[str, re.compile(r"([A-Z_]+://)?[\w.:\[\]-]+")]


Offload = Literal[True, False, "always"]


Recompute = Literal["none", "selective", "full"]


Fp8 = Literal["none", "blockwise", "mxfp8"]


_STOP_TEXTS = "texts of 1 to 1024 characters, such as ['</answer>']"
StopText = Annotated[str, re.compile(r"[^\ufffd]{1,1024}", re.DOTALL), _STOP_TEXTS]
