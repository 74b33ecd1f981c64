"""What ``generate`` of transformers is called with, as our engine takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import DataError, did_you_mean
from hybridflow.families.assets import Ends
from hybridflow.rollout.request import SamplingParams

_INSTEAD = {
    "num_beams": "beams are not searched; draw several with num_return_sequences and do_sample=True",
    "max_time": "set deadline_s in hybrid_config",
    "output_scores": "actor(input_ids=…, labels=…).log_probs tells log-probabilities",
    "output_logits": "actor(input_ids=…).logits tells them",
    "return_dict_in_generate": "generate gives the token ids alone",
    "streamer": "hybridflow serve streams",
    "generation_config": "give its values one by one",
    "stopping_criteria": "give stop_strings or eos_token_id",
    "logits_processor": "give logit_bias, bad_words_ids or the penalties",
    "assistant_model": "there is no speculative decoding here; leave it out",
}
"""Arguments of transformers that are not taken -> what to do instead."""

_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""What is not read where the likeliest token is taken."""

_PASSED = (
    *_OF_SAMPLING,
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens", "seed"),
)
_KNOWN = (
    *("max_new_tokens", "max_length", "do_sample", "num_return_sequences", "eos_token_id", "pad_token_id"),
    *("stop_strings", "bad_words_ids", "token_type_ids", "use_cache"),
    *_PASSED,
)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How responses are generated.

    Attributes:
        params: Sampling parameters of each response.
        num_samples: Samples of each prompt.
        pad_id: Token behind shorter responses.
    """

    params: SamplingParams
    num_samples: int
    pad_id: int


def generation_of(given: Mapping[str, Any], ends: Ends, *, longest_prompt: int) -> Generation:
    """Check and return the arguments of ``generate``.

    Args:
        given: As transformers names them; ``token_type_ids`` and ``use_cache`` say nothing here.
        ends: End and padding tokens of the model.
        longest_prompt: In tokens with its padding, from which ``max_length`` counts.

    Raises:
        DataError: One is not known here, or has a value that is not allowed.
    """
    for name in given:
        if name in _INSTEAD:
            raise DataError(f"generate: {name}: {_INSTEAD[name]}")
        if name not in _KNOWN:
            raise DataError(f"generate: {name}: unknown; {did_you_mean(name, _KNOWN)}it takes {', '.join(_KNOWN)}")
    is_greedy = not given.get("do_sample", False)
    num_samples = given.get("num_return_sequences", 1)
    if type(num_samples) is not int or num_samples < 1:
        raise DataError(f"generate: num_return_sequences={num_samples!r}; give 1 or more")
    if is_greedy and num_samples > 1:
        raise DataError(f"generate: num_return_sequences={num_samples} would be equal; set do_sample=True")
    passed = {name: given[name] for name in _PASSED if given.get(name) is not None}
    if is_greedy:
        passed = {name: value for name, value in passed.items() if name not in _OF_SAMPLING}
    elif passed.get("temperature", 1.0) == 0:
        raise DataError("generate: temperature=0; for the likeliest token set do_sample=False")
    most = _most_tokens(given, longest_prompt)
    if passed.get("min_new_tokens"):
        # There, the token that ends a response is not counted.
        passed["min_new_tokens"] = min(passed["min_new_tokens"] + 1, most)
    eos_ids = given.get("eos_token_id")
    eos_ids = ends.eos_ids if eos_ids is None else _listed(eos_ids)
    pad_id = given.get("pad_token_id")
    params = SamplingParams(
        max_new_tokens=most,
        stop_ids=tuple(eos_ids),
        stop=tuple(_listed(given.get("stop_strings") or ())),
        bad_ids=tuple(tuple(ids) for ids in given.get("bad_words_ids") or ()),
        greedy=is_greedy,
        **passed,
    )
    # As transformers fills up where no token is there for it.
    fallbacks = (pad_id, ends.pad_id, *eos_ids, 0)
    pad_id = next(each for each in fallbacks if each is not None)
    return Generation(params=params, num_samples=num_samples, pad_id=pad_id)


def _most_tokens(given: Mapping[str, Any], longest_prompt: int) -> int:
    most: int | None = given.get("max_new_tokens")
    whole = given.get("max_length")
    if most is None and whole is None:
        raise DataError("generate: how long? give max_new_tokens, or max_length with the prompt's tokens")
    if most is not None:
        return most
    if type(whole) is not int or whole <= longest_prompt:
        raise DataError(
            f"generate: max_length={whole!r} with prompts of {longest_prompt} tokens, padding included, leaves none to "
            "generate; raise it, or give max_new_tokens"
        )
    return whole - longest_prompt


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, int | str) else list(value)
