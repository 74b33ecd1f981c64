"""Typed sections: from YAML and dotted overrides to frozen dataclasses, and back. Knows no recipe.

A section is a dataclass whose fields are ``int``, ``float``, ``str``, ``bool``, a ``Literal``, another section, a tuple
of any of these, or any of them ``| None``; or a ``dict[str, …]`` of texts or of any values, for names that others have
chosen. ``Annotated`` adds ``Bounds`` to a number, a regular expression to text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from hybridflow.errors import ConfigError, LayoutError

_Section = TypeVar("_Section")

NOT_A_KEY: Mapping[str, Any] = types.MappingProxyType({"is_key": False})
"""Metadata of a field that no recipe sets: the program fills it in."""

MAY_CHANGE: Mapping[str, Any] = types.MappingProxyType({"may_change": True})
"""Metadata of a field that a resumed run may change, with all keys below it. A field without it must match."""


FILLED_IN: Mapping[str, Any] = types.MappingProxyType({"filled_in": True})
"""Metadata of a field without a default that the program sets where a person leaves it out."""


def may_change_below(*names: str) -> Mapping[str, Any]:
    """Return metadata of a field that holds a section: a resumed run may change these keys of that section here."""
    return types.MappingProxyType({"may_change_below": names})


# What a person calls each type.
_WORDS: dict[type, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_PLURALS: dict[type, str] = {int: "integers", float: "numbers", str: "texts"}
# YAML 1.1 reads a number with an exponent and no point, such as 1e-4, as text.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
# YAML 1.1 reads 1:30 as 90, and 010 as 8.
_MISREAD = re.compile(r".*:.*|[-+]?0[0-9_]+")
_PLAIN = re.compile(r"[\w.:+-]+")
"""A number or a date without quotes, tags, blanks and comments."""

LARGEST_INTEGER = 1 << 24
"""Largest integer of a key that has no other bound."""

_INTEGERS = re.compile(r"\[(?:0|[1-9][0-9]{0,17})(?:, ?(?:0|[1-9][0-9]{0,17}))*\]")
"""A list that YAML and JSON read alike."""

_MOST_CHARACTERS = 1 << 19
"""Longest YAML in characters, with its aliases written out."""

_MOST_LEVELS = 64
"""Deepest nesting of YAML, and of dotted keys."""

_MOST_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Which numbers a key takes; annotates its type.

    Attributes:
        low: Smallest number allowed; with ``above``, the number that must be exceeded.
        high: Largest number allowed.
        above: Whether ``low`` itself is refused.
        below: Whether ``high`` itself is refused.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, number: float) -> bool:
        high_enough = number > self.low if self.above else number >= self.low
        low_enough = number < self.high if self.below else number <= self.high
        return high_enough and low_enough and math.isfinite(number)

    def __str__(self) -> str:
        upper = "" if self.high == math.inf else f" and {'below' if self.below else 'at most'} {_in_words(self.high)}"
        return f"{'above' if self.above else 'of at least'} {self.low:g}{upper}"


Count = Annotated[int, Bounds(low=1)]
CountOrZero = Annotated[int, Bounds(low=0)]
ListedCount = Annotated[int, Bounds(low=1, high=1 << 16)]
"""Number of things that a plan or a start lists one by one: ranks, experts, processes."""

Seed = Annotated[int, Bounds(low=0, high=1 << 53)]
"""Every reader of JSON holds it exactly."""

Positive = Annotated[float, Bounds(low=0, above=True)]
NotNegative = Annotated[float, Bounds(low=0)]
Seconds = Annotated[float, Bounds(low=0, high=10**8, above=True)]
"""How long to wait. The clocks of the system take no number that is much larger."""

Share = Annotated[float, Bounds(low=0, high=1)]
Decay = Annotated[float, Bounds(low=0, high=1, below=True)]
"""Share of a running mean that stays in each step. With 1 the mean would never change."""


def _in_words(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def read_yaml(path: Path) -> object:
    """Return the value that a YAML file stands for.

    Raises:
        ConfigError: The file cannot be read, or ``parse_yaml`` refuses it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> object:
    """Return the value that a YAML text stands for.

    Args:
        text: The YAML.
        source: What messages call it.

    Raises:
        ConfigError: The text is not YAML, gives a key twice, or is too long or nested too deeply.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{source}: is longer than {_MOST_CHARACTERS} characters; write less")
    if _INTEGERS.fullmatch(text):
        return json.loads(text)  # JSON reads the ranks of a large job a hundred times as fast.
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, source)
        return loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{source}: is nested deeper than {_MOST_LEVELS} levels; nest it less") from None
    # All but the first: a tag that does not fit its text, and an impossible date.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{source}: not valid YAML: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """Return what is wrong with a YAML text: place, the text there, and why; PyYAML draws it over several lines."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(error).split())
    found = (mark.get_snippet(indent=0) or "").partition("\n")[0].strip()
    begun = error.context_mark
    since = f" from line {begun.line + 1} on" if begun is not None and begun.line != mark.line else ""
    context = "" if error.context is None else f"{error.context}{since}, "
    return f"line {mark.line + 1}, column {mark.column + 1}, {found!r}: {context}{error.problem}"


def _check_size(root: yaml.Node, source: str) -> None:
    """Refuse YAML that is too large with its aliases written out, before anything writes them out."""
    size, left = 0, [(root, 0, source)]
    while left:
        node, depth, where = left.pop()
        size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if depth > _MOST_LEVELS:
            raise ConfigError(f"{where}: is nested deeper than {_MOST_LEVELS} levels; nest it less")
        if size > _MOST_CHARACTERS:
            raise ConfigError(
                f"{where}: is longer than {_MOST_CHARACTERS} characters with its aliases written out; use fewer aliases"
            )
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                # The outermost key is enough to find the place.
                is_outermost = depth == 0 and isinstance(key, yaml.ScalarNode)
                place = f"{source}: {shorten(key.value)}" if is_outermost else where
                left += [(key, depth + 1, place), (value, depth + 1, place)]
        elif isinstance(node, yaml.SequenceNode):
            left += [(item, depth + 1, where) for item in node.value]


def shorten(text: str) -> str:
    """Return a text for a message, without its end if it is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def read_section(
    kind: type[_Section], values: object, *, source: str, origins: Mapping[str, str] | None = None
) -> _Section:
    """Build a section, and those inside it, from nested mappings; the inverse of ``to_dict``.

    Args:
        kind: The dataclass.
        values: The mapping.
        source: What messages call it.
        origins: For keys that came from elsewhere, what messages call that, as ``put_over`` tells.

    Raises:
        ConfigError: A key is unknown, missing, ill-typed or out of bounds.
        LayoutError: A section that is a layout has an impossible size.
    """
    if not isinstance(values, Mapping):
        names = ", ".join(item.name for item in keys_of(kind))
        raise ConfigError(f"{source}: expected a mapping with keys {names}; found {_found(values)}")
    return _Reader(root=kind, source=source, origins={} if origins is None else origins).section(kind, values, "")


def to_dict(section: Any) -> dict[str, Any]:
    """Return the section as nested dicts and lists with every key, ready for YAML or JSON."""
    return {item.name: _plain(getattr(section, item.name)) for item in keys_of(section)}


def keys_of(section: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a section (a class or an object) that a recipe may set."""
    return tuple(item for item in dataclasses.fields(section) if item.metadata.get("is_key", True))


def changed_keys(section: Any, names: Iterable[str] | None = None) -> list[str]:
    """Return the keys of a section, or those named, whose values are not their defaults."""
    defaults = {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in keys_of(section)
    }
    return [name for name in (defaults if names is None else names) if getattr(section, name) != defaults[name]]


def resume_rules(kind: Any) -> dict[str, bool]:
    """Return every dotted key of a section and of those inside it, and whether a resumed run may change it.

    Keys within a list of sections have no dotted name: the list is one key.
    """
    return dict(_resume_rules(kind, "", is_free=False, free_names=()))


@functools.cache
def text_keys(kind: Any) -> frozenset[str]:
    """Return the dotted keys of a section, and of those inside it, that take text, perhaps null, and nothing else."""
    found = set()
    for item in keys_of(kind):
        hint = _hints(kind)[item.name]
        is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        options = [each for each in (typing.get_args(hint) if is_union else (hint,)) if each is not type(None)]
        for option in options:
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                found |= {f"{item.name}.{key}" for key in text_keys(option)}
        plain = [typing.get_args(each)[0] if typing.get_origin(each) is Annotated else each for each in options]
        if plain == [str]:
            found.add(item.name)
    return frozenset(found)


def _resume_rules(kind: Any, prefix: str, *, is_free: bool, free_names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    hints = _hints(kind)
    for item in keys_of(kind):
        may_change = is_free or item.name in free_names or item.metadata.get("may_change", False)
        yield f"{prefix}{item.name}", may_change
        hint, below = hints[item.name], item.metadata.get("may_change_below", ())
        for option in (hint, *typing.get_args(hint)):
            is_section = isinstance(option, type) and dataclasses.is_dataclass(option)
            if is_section and typing.get_origin(hint) is not tuple:
                yield from _resume_rules(option, f"{prefix}{item.name}.", is_free=may_change, free_names=below)


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would silently keep the last of two equal keys, made to refuse them.

    A number that YAML 1.1 reads as another one, or that no key takes, stays text: no key for a number takes it.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shorten(key_node.value)!r} twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        text = str(self.construct_scalar(node))
        if _MISREAD.fullmatch(text) or len(text) > _MOST_SHOWN:
            return text
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def put_over(
    values: Mapping[Any, Any], overrides: Sequence[str], *, texts: Collection[str] = ()
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return a copy of the values with the overrides applied, and the override that set each dotted key.

    Args:
        values: Nested mappings.
        overrides: ``"dotted.key=value"`` each, the value in YAML; later ones win.
        texts: Dotted keys that take text alone, as ``text_keys`` tells: what YAML reads as a number or a date stays
            text.

    Raises:
        ConfigError: One of them is not of that form, or reaches into what is no section.
    """
    merged = _copy_mappings(values)
    origins: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        shown = f"override {shorten(override)!r}"
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{shown}: expected dotted.key=value, for instance trainer.steps=10")
        *sections, last = key.split(".")
        if len(sections) > _MOST_LEVELS:
            raise ConfigError(f"{shown}: has {len(sections)} dots, and no key has more than {_MOST_LEVELS}")
        place = merged
        for depth, section in enumerate(sections):
            if place.get(section) is None:
                place[section] = {}
            if not isinstance(place[section], dict):
                name = ".".join(sections[: depth + 1])
                raise ConfigError(f"{shown}: {name} is {_found(place[section])}, not a section with keys")
            place = place[section]
        value = parse_yaml(text, shown)
        is_read = isinstance(value, int | float | datetime.date) and not isinstance(value, bool)
        place[last] = text.strip() if is_read and key in texts and _PLAIN.fullmatch(text.strip()) else value
        origins[key] = shown
    return merged, origins


def _copy_mappings(value: Any) -> Any:
    return {key: _copy_mappings(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Turns mappings into sections, and names the place in every complaint.

    Attributes:
        root: The outermost section, where a misplaced key may belong.
        source: The file.
        origins: For each overridden key, the override.
    """

    root: type
    source: str
    origins: Mapping[str, str]

    def section(self, kind: type[_Section], values: Mapping[Any, Any], prefix: str) -> _Section:
        all_hints = _hints(typing.cast(type, kind))
        keys = keys_of(kind)
        hints = {item.name: all_hints[item.name] for item in keys}
        # Keys that are other words for some of its own.
        translate = getattr(kind, "in_our_words", dict)
        with self._naming(prefix):
            values = translate(values)
        for key in values:
            if key not in hints:
                raise self._unknown(str(key), list(hints), prefix)
        read = {}
        for item in keys:
            key = f"{prefix}{item.name}"
            if item.name in values:
                read[item.name] = self.value(hints[item.name], values[item.name], key)
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise self._error(key, f"missing; expected {describe(hints[item.name])}")
        with self._naming(prefix):
            return kind(**read)

    @contextlib.contextmanager
    def _naming(self, prefix: str) -> Iterator[None]:
        """Name the section in an error about its layout."""
        try:
            yield
        except LayoutError as error:
            raise LayoutError(f"{self._origin(prefix[:-1])}: {prefix[:-1]}: {error}") from None

    def value(self, hint: Any, value: object, key: str) -> Any:
        bounds: tuple[Any, ...] = ()
        kind = hint
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            if value is None:
                return None
            options = [option for option in typing.get_args(hint) if option is not type(None)]
            # Of a list or a word, a text can only be the word.
            words = [option for option in options if typing.get_origin(option) is Literal]
            kind = words[0] if words and isinstance(value, str) else options[0]
        if typing.get_origin(kind) is Annotated:
            kind, *rest = (each for each in typing.get_args(kind) if not isinstance(each, str))
            bounds = tuple(rest)
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return self.section(typing.cast(type, kind), value, f"{key}.")
        if typing.get_origin(kind) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
            (item_kind, _) = typing.get_args(kind)
            return tuple(self.value(item_kind, item, f"{key}[{index}]") for index, item in enumerate(value))
        if typing.get_origin(kind) is dict and isinstance(value, Mapping):
            (_, item_kind) = typing.get_args(kind)
            if item_kind is Any:
                return self._any_values(value, key)
            return {name: self.value(item_kind, item, f"{key}.{name}") for name, item in flat(value).items()}
        if kind is float:
            value = _as_float(value)
        allowed = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
        fits = any(value == item and type(value) is type(item) for item in allowed) if allowed else type(value) is kind
        is_bounded = any(isinstance(bound, Bounds) and bound.high < math.inf for bound in bounds)
        if kind is int and type(value) is int and value > LARGEST_INTEGER and not is_bounded:
            link = "and" if bounds else "of"
            expected = f"{describe(hint)} {link} at most {LARGEST_INTEGER}"
            raise self._error(key, f"expected {expected}, found {_found(value)}")
        if not fits or not all(_within(value, bound) for bound in bounds):
            remedy = _remedy(kind, value, key) if dataclasses.is_dataclass(kind) else ""
            raise self._error(key, f"expected {describe(hint)}, found {_found(value)}{remedy}")
        return value

    def _any_values(self, values: Mapping[Any, Any], key: str) -> dict[str, Any]:
        for name, value in values.items():
            try:
                json.dumps({typing.cast(str, name): value}, allow_nan=False)
            except (TypeError, ValueError):
                found = _found(value)
                raise self._error(f"{key}.{name}", f"expected a value that JSON can have, found {found}") from None
        return {str(name): _copy_mappings(value) for name, value in values.items()}

    def _unknown(self, name: str, siblings: list[str], prefix: str) -> ConfigError:
        elsewhere = [key for key in resume_rules(self.root) if key.split(".")[-1] == name]
        elsewhere.sort(key=lambda key: key.partition(".")[0] != prefix.partition(".")[0])
        close = [f"{prefix}{each}" for each in difflib.get_close_matches(shorten(name), siblings, n=1)]
        nearest = " or ".join(elsewhere or close)
        hint = f"did you mean {nearest}? " if nearest else ""
        if ":" in name:
            hint = "YAML needs a blank behind each colon, as in '{tp: 2, dp: 8}'; "
        where = f"keys of {prefix[:-1]}" if prefix else "keys"
        told = f"unknown key; {hint}{where}: {', '.join(siblings)}"
        return ConfigError(f"{self._origin(f'{prefix}{name}')}: {prefix}{shorten(name)}: {told}")

    def _error(self, key: str, complaint: str) -> ConfigError:
        return ConfigError(f"{self._origin(key)}: {key}: {complaint}")

    def _origin(self, key: str) -> str:
        for given, override in reversed(list(self.origins.items())):
            if f"{key}.".startswith(f"{given}.") or f"{given}.".startswith(f"{key}."):
                return override
        return self.source


def _remedy(kind: Any, value: object, key: str) -> str:
    """Say how a section is written that was given as something else."""
    if value is None:
        return "; {} means the defaults"
    if hasattr(kind, "as_section"):
        written = kind.as_section(value) if isinstance(value, str) else None
        return f"; write {written}" if written else ""
    if hasattr(kind, "EXAMPLE"):
        return ""
    return f"; give its keys, as in {key}.{keys_of(kind)[0].name}=…"


def _as_float(value: object) -> object:
    # A float holds no integer of more bits.
    if (type(value) is int and value.bit_length() < 1024) or (isinstance(value, str) and _EXPONENT.fullmatch(value)):
        return float(typing.cast(str, value))
    return value


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted name, with numbers and booleans as text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            is_plain = isinstance(value, int | float)
            found[f"{prefix}{name}"] = str(value).lower() if is_plain else value
    return found


def _within(value: Any, bound: Bounds | re.Pattern[str]) -> bool:
    return value in bound if isinstance(bound, Bounds) else bool(bound.fullmatch(value))


def describe(hint: Any) -> str:
    """Describe in words the values that a key takes."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join("null" if option is type(None) else describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Annotated:
        kind, bound, *words = typing.get_args(hint)
        if words:
            return str(words[0])
        return f"{describe(kind)} {bound}" if isinstance(bound, Bounds) else f"{describe(kind)} like {bound.pattern}"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(_in_yaml, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        (item, _) = typing.get_args(hint)
        return "a list of " + (_PLURALS[item] if item in _PLURALS else describe(item).replace("a section", "sections"))
    if hint == dict[str, Any]:
        return "a mapping of names to values"
    if typing.get_origin(hint) is dict:
        return f"a mapping of names to {describe(typing.get_args(hint)[1])}"
    if dataclasses.is_dataclass(hint):
        example = getattr(hint, "EXAMPLE", None)
        such = f", such as {example}" if example else ""
        return "a section with keys " + ", ".join(item.name for item in keys_of(hint)) + such
    return _WORDS[hint]


def _in_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _found(value: object) -> str:
    kinds: dict[type, str] = {**_WORDS, dict: "a section", list: "a list"}
    return "null" if value is None else f"{_shown(value)} ({kinds.get(type(value), type(value).__name__)})"


def _shown(value: object) -> str:
    # Python writes no integer of more than 4300 digits in decimal.
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return shorten(repr(value))
