"""Scores responses. `hybridflow train` imports this file from the directory in which it is started."""

from difflib import SequenceMatcher


def score(prompt: str, response: str, answer: str) -> float:
    """Return how good a response is: any finite number, larger is better. Change it to what you want."""
    said, right = response.strip(), str(answer).strip()
    if not right:
        # The row has no answer. Short responses are better, until you say what is.
        return -len(said) / 1000
    if said == right:
        return 1.0
    # Part of a point for what is nearly right, so that there is something to learn from early on.
    return 0.5 * SequenceMatcher(None, said, right).ratio()
