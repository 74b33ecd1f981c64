r"""Notation of maths in answers and responses: Unicode to LaTeX, currencies, digits in groups, words and units.

No torch, and no algebra system: text comes in, text goes out.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_COMMANDS = {
    "×": "times",
    **dict.fromkeys("·⋅∙∗", "cdot"),
    **dict.fromkeys("≤⩽", "le"),
    **dict.fromkeys("≥⩾", "ge"),
    **{"÷": "div", "±": "pm", "∓": "mp", "≠": "ne", "≈": "approx", "∞": "infty"},
    **{"∪": "cup", "∩": "cap", "∈": "in", "∅": "emptyset"},
    **{"π": "pi", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "θ": "theta", "λ": "lambda", "φ": "phi"},
}
"""Character -> LaTeX command. The letters µ and Ω are not here: they are units more often than variables."""
_FRACTIONS = {
    chr(code): r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKD", chr(code)).split("⁄"))
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}
_CHARACTERS = {
    **{ord(each): f"\\{name} " for each, name in _COMMANDS.items()},
    **{ord(each): fraction for each, fraction in _FRACTIONS.items()},
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **{ord(each): "-" for each in "−‐‑﹣"},
    **{ord(each): "/" for each in "⁄∕"},
    **{ord(each): "" for each in "\u200b\u2060\u2061\u2062\u2063\ufeff"},
    ord("°"): r"^\circ ",
}
_ROOT = re.compile(rf"([{''.join(_ROOTS)}]) ?(\((?:[^()]|\([^()]*\))*\)|\d+(?:\.\d+)?|[^\W\d_])?")
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_TEMPERATURE = re.compile(r"(?:°|\^\{?\\circ\}?) ?[CF]\b")
_MINUS = re.compile(r"(?<!\d)–|–(?!\d)")
"""A dash between digits is a range."""
_EAST_ASIAN = "\u2e80-\ud7ff"
_GLUED = re.compile(
    rf"(?<=[{_EAST_ASIAN}])(?=[^\s{_EAST_ASIAN}])|(?<=[^\s{_EAST_ASIAN}])(?=[{_EAST_ASIAN}])|(?<=[^\d:]:)(?=-?\.?\d)"
)
"""Between a word or a colon and a number, which the library reads behind a space alone."""
_ESCAPED_DOLLAR = re.compile(r"(?<!\\)(?:\b[A-Z]{1,3})?\\\$")
_DOLLAR = re.compile(
    r"(?P<maths>\$\$.*?\$\$|\$(?!-?\.?\d)[^$\n]*\$|\$[^$\n]*(?<=\S)\$(?!\d)"
    r"|\$(?:[^$\nA-Za-z]|\\[A-Za-z]+|[A-Za-z](?![A-Za-z]))*\$(?!\d))"
    r"|(?:\b[A-Z]{1,3})?\$(?=-?\.?\d)",
    re.DOTALL,
)
"""Two dollars with maths between them, or the dollar of a price. A dollar before a digit, or behind words and a space,
closes no maths."""
_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\\[,;:! ]|~|\{,\}|[ \u00a0\u2009\u202f])\d{3})+(?!\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w|\.\d)")
_MIXED = re.compile(r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?![\d/])")
_PERCENT = re.compile(r"(?<=\d)\s*\b(?:percent|pct)\b")
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(pi|(?:arc)?(?:sin|cos|tan)|log|ln)(?![A-Za-z])")
_SQUARE_ROOT = re.compile(r"(?<![A-Za-z])\\?sqrt\s*\(((?:[^()]|\([^()]*\))*)\)")

_MARKS = re.compile(r"\$|\\[()\[\]]|\\boxed")
"""What is before or behind LaTeX in a text."""
_PLAIN_BOX = re.compile(r"(?<=\\boxed)\{([^{}\\]*)\}")
_ATOM = (
    r"(?:\\[A-Za-z]+|[\d()\[\]{}^_+\-/=<>%]|(?<!\*)\*(?!\*)|[.,](?=\d)"
    r"|(?<![A-Za-z\\])(?![aAI] +[A-Za-z]{2})[A-Za-z](?![A-Za-z]))"
)
_RUN = re.compile(rf"(?![aAI] |[=*]){_ATOM}(?: *{_ATOM})*")
"""A formula in a line: all that may be in one, but for words such as ``a``, and emphasis."""
_HAS_LATEX = re.compile(r"\\(?!text|mathrm|mbox|begin|end)[A-Za-z]|[\dxyznab)]\^")
"""The power of another letter is a unit more often."""

_UNITS = (
    "km|cm|dm|mm|nm|kg|mg|ml|mL|dl|cl|ft|yd|mi|oz|lb|hr|ms|kW|Hz|Pa|kJ|eV|MB|GB|KB|TB|cc|min|sec|mph|kmh|hrs|yrs|lbs|"
    "kWh|kHz|MHz|GHz|kPa|mol|USD|EUR|GBP|yen|pts"
)
_SHORT_WORDS = "am|an|as|at|be|by|do|go|he|if|in|is|it|me|my|no|of|on|pm|so|to|up|us|we"
_REST = r"(?:\^\{?-?\d\}?)?(?:\s*(?:/|\\cdot )\s*[A-Za-z]+(?:\^\{?-?\d\}?)?)*"
"""An exponent, and more units."""
_TOKEN = re.compile(
    r"(?P<kept>\\(?:text|textbf|textrm|mathrm|mbox|operatorname|begin|end)\s*\{[^{}]*\}"
    r"|\\(?:angle|triangle)\s*[A-Z]{3}|\\[A-Za-z]+)"
    r"|(?P<joint>,?\s*\b(?:and|or)\b\s*)"
    r"|\b[ap]\.\s?m\b\.?|(?<=\d)(?:st|nd|rd|th)\b"
    rf"|(?<![A-Za-z])(?:{_UNITS})(?![A-Za-z]){_REST}"
    rf"|(?<=[\d}}])\s+[mgshtdlLJNWVAKCF](?![A-Za-z]){_REST}(?=\s*[.,;!?]?\s*$|\s+[A-Za-z]{{2}})"
    rf"|(?<![A-Za-z])(?i:{_SHORT_WORDS})(?![A-Za-z])|\b[aAI](?=\s+[A-Za-z]{{2}})"
    rf"|(?:(?<![A-Za-z\d])[A-Za-z]{{3,}}|(?<=\d)[A-Za-z]{{4,}}|[^\W\d_A-Za-z]+){_REST}"
)
"""A command of LaTeX, ``and``, or a word or unit. Few letters behind a digit are variables unless they are a unit."""
_WORD, _JOINT = "\0", "\1"
"""Stand for a word, and for ``and``."""
_NUMBER_WORD = re.compile(
    r"(?i)\b(?:hundred|thousand|[mb]illion|trillion|dozen|plus|minus|negative|squared|cubed)s?\b|[a-z]{3,}\([^)]*\d"
)
"""A word that changes the number beside it, or the name of a function."""
_TEXT_BETWEEN = re.compile(r"\d\s*\\(?:text|mbox|mathrm)\s*\{(?!\s*(?:and|or)\s*\})[^{}]*[A-Za-z]{2}[^{}]*\}\s*\d")
_OPERATOR = r"(?:[*/^<>]|\\(?:times|cdot|div|le|ge)\b)"
_UNFINISHED = re.compile(rf"^{_OPERATOR}|(?:{_OPERATOR}|[-+=])$|^[^\\]*\d\s+\d|\d['\"]|[^\x00-\x7f]")
"""An operator without a number, numbers without an operator, or a character that is not translated."""


def to_latex(text: str) -> str:
    """Return a text with LaTeX for Unicode maths, plain digits for large numbers, and no dollars before prices."""
    text = _TEMPERATURE.sub(" ", _MINUS.sub("-", _ROOT.sub(_root, text)))
    text = _RAISED.sub(lambda match: _script("^", "".join(_SUPERSCRIPTS[each] for each in match[0])), text)
    text = _LOWERED.sub(lambda match: _script("_", "".join(_SUBSCRIPTS[each] for each in match[0])), text)
    text = _ESCAPED_DOLLAR.sub("", _GLUED.sub(" ", text.translate(_CHARACTERS)))
    text = _DOLLAR.sub(lambda match: match["maths"] or "", text)
    text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    return _SCIENTIFIC.sub(lambda match: f"{Decimal(match[0]):f}", text)


def _root(match: re.Match[str]) -> str:
    root, inner = _ROOTS[match[1]], match[2]
    return f"{root} " if inner is None else f"{root}{{{inner}}}"


def _script(mark: str, inner: str) -> str:
    return f"{mark}{inner}" if len(inner) == 1 else f"{mark}{{{inner}}}"


def with_marks(text: str) -> str:
    """Return a response with marks around formulas of lines that have none, and without words in plain boxes."""
    text = _PLAIN_BOX.sub(lambda match: f"{{{formula_of(match[1]) or match[1]}}}", text)
    if "$$" in text:
        return text
    return "\n".join(line if is_marked(line) else _RUN.sub(_marked, line) for line in text.split("\n"))


def _marked(match: re.Match[str]) -> str:
    if not _HAS_LATEX.search(match[0]):
        return match[0]
    formula = match[0].rstrip("-+*/=<>([{^_ ")
    return f"${formula}${match[0][len(formula) :]}"


def is_marked(text: str) -> bool:
    """Return whether marks tell where LaTeX begins."""
    return _MARKS.search(text) is not None


def is_formula(text: str) -> bool:
    """Return whether a text is one line without words, units and marks."""
    return not is_marked(text) and "\n" not in text.strip() and _WORD not in _without_words(text)


def formula_of(text: str) -> str | None:
    """Return the formula of a text without marks.

    Returns:
        LaTeX of the only formula. Empty text: there are only words. None: there are several formulas, or a part of one
        would be left over.
    """
    bare = _without_words(text.rpartition("####")[2])
    if _WORD not in bare:
        found = bare.replace(_JOINT, ", ").strip().rstrip(".").lstrip("= ")
    elif not re.search(r"\d|\\", bare):
        return ""
    else:
        parts = [part.strip(" \t\n.,;:!?'\"*=") for part in re.split(f"[{_WORD}{_JOINT}]", bare)]
        numbers = [part for part in parts if re.search(r"\d|\\", part)]
        others = "".join(part for part in parts if part not in numbers)
        if len(numbers) != 1 or _JOINT in bare or re.search(r"[+=<>^]", others):
            return None
        if _NUMBER_WORD.search(text) or ":" in numbers[0]:
            return None
        found = _balanced(numbers[0])
    return None if _UNFINISHED.search(found) or _TEXT_BETWEEN.search(found) else found


def _without_words(text: str) -> str:
    text = _FUNCTION.sub(r"\\\1", _SQUARE_ROOT.sub(r"\\sqrt{\1}", _PERCENT.sub("%", text)))
    text = "".join(map(_plain, _MIXED.sub(r"\1\\frac{\2}{\3}", text)))
    text = " ".join(text.split())
    return _TOKEN.sub(lambda match: match["kept"] or (_JOINT if match["joint"] else _WORD), text)


def _plain(character: str) -> str:
    """Return a word's stand-in for a symbol or sign of punctuation that is no operator, else the character."""
    if character.isascii() or unicodedata.category(character) in ("Sm", "Pd"):
        return character
    return _WORD if unicodedata.category(character)[0] in "SPM" else character


def _balanced(text: str) -> str:
    """Return a text without the parentheses at its ends whose partners are not there."""
    num_open = text.count("(") - text.count(")")
    if num_open > 0:
        return text.rstrip("( ") if text.endswith("(") else text.lstrip("( ")
    return text.strip(") ") if num_open < 0 else text
