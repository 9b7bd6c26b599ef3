"""The messages about a config that is not valid: key path, requirement, remedy."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from fastrl.config.aliases import ALIASES, TYPE_ALIASES
from fastrl.config.base import Config, UserError
from fastrl.config.import_path import is_import_path
from fastrl.config.loss_options import LossConfig
from fastrl.config.user_losses import user_loss

MOST_MISTAKES = 10
"""Key paths whose mistakes are described; of more, the number is told."""


class Mistake(NamedTuple):
    """One thing that is wrong with a config.

    Attributes:
        path: keys and list indices from the top of the config, joined by dots.
        text: a sentence that names the path.
    """

    path: str
    text: str


def mistakes(
    error: ValidationError, config_class: type[Config], values: Mapping[str, Any]
) -> tuple[list[Mistake], int]:
    """What pydantic found, one mistake a key path, in terms of the user's own keys.

    Args:
        error: raised when `values` were validated as `config_class`.
        config_class: class of the whole config.
        values: the plain values that were validated.

    Returns:
        The first `MOST_MISTAKES` of them, and the number of the others.
    """
    found: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    others: set[str] = set()
    all_details = error.errors(include_url=False)
    parents = {details["loc"][:n] for details in all_details for n in range(len(details["loc"]))}
    for details in all_details:
        if _follows(details, parents):
            continue
        place = _find(config_class, values, details["loc"])
        path = ".".join(place.path)
        if path not in found and len(found) == MOST_MISTAKES:
            others.add(path)
            continue
        text = _describe(details, place, config_class)
        if text not in found.setdefault(path, []):
            found[path].append(text)
        shown[path] = _shown(details["input"])
    listed = [Mistake(path, _sentence(path, texts, shown[path])) for path, texts in found.items()]
    return listed, len(others)


def told(
    error: ValidationError, config_class: type[Config], values: Mapping[str, Any]
) -> ValidationError:
    """The same error with the sentences of `mistakes` in place of pydantic's."""
    listed, num_others = mistakes(error, config_class, values)
    if num_others:
        listed = [*listed, Mistake("", f"and {num_others:,} more")]
    lines = [
        InitErrorDetails(
            type=PydanticCustomError("config", "{text}", {"text": mistake.text}),
            loc=tuple(filter(None, mistake.path.split("."))),
            input=None,
        )
        for mistake in listed
    ]
    return ValidationError.from_exception_data(error.title, lines, hide_input=True)


def _follows(details: ErrorDetails, parents: Collection[tuple[str | int, ...]]) -> bool:
    """Whether an error only says that another one is there, in one of the `parents`.

    A default cannot be derived from a key that is wrong, and a list whose items are wrong counts
    as one without them.
    """
    return details["type"] == "default_factory_not_called" or (
        details["type"] == "too_short" and details["loc"] in parents
    )


def _sentence(path: str, texts: Sequence[str], shown: str) -> str:
    """The texts about one value as a sentence; requirements get the path and the value."""
    if all(text.startswith("must be ") for text in texts):
        wanted = " or ".join(text.removeprefix("must be ") for text in texts)
        return f"`{path or 'config'}` must be {wanted}, got {shown}"
    return "; ".join(texts)


class _Place(NamedTuple):
    """The place of an error in the values.

    Attributes:
        path: keys and indices as the user wrote them.
        section: class of the section that holds the last key, if it is known.
        tag: the `type` that stands in the section, None without one.
        members: the classes that the section may be, one for each `type` of a union.
        value_members: the same for the value itself.
    """

    path: tuple[str, ...]
    section: type[Config] | None
    tag: object
    members: tuple[type[Config], ...]
    value_members: tuple[type[Config], ...]


def _find(root: type[Config], values: object, loc: Sequence[str | int]) -> _Place:
    """The place that pydantic's `loc` means, without the tags of unions in it."""
    path: list[str] = []
    node = values
    annotations: tuple[Any, ...] = (root,)
    holder: tuple[type[Config], ...] = ()
    section: type[Config] | None = None
    tag: object = None
    for position, element in enumerate(loc):
        last = position == len(loc) - 1
        present = isinstance(node, dict) and element in node
        missing = isinstance(node, dict) and last and _names_a_field(annotations, element)
        indexed = isinstance(node, list) and isinstance(element, int) and element < len(node)
        if not (present or missing or indexed):
            continue  # the tag of a union member
        path.append(str(element))
        holder = tuple(member for item in annotations for member in _members(item))
        section = _chosen(holder, node)
        tag = _tag(node)
        if section is not None and isinstance(node, dict):
            field = section.model_fields.get(str(element))
            annotations = (field.annotation,) if field is not None else ()
        else:
            annotations = tuple(inner for item in annotations for _, inner in _items(item))
        node = node[element] if present or indexed else None  # type: ignore[index]
    value_members = tuple(member for item in annotations for member in _members(item))
    return _Place(tuple(path), section, tag, holder, value_members)


def _names_a_field(annotations: Sequence[Any], key: str | int) -> bool:
    """Whether one of the classes has a field of this name."""
    return any(key in member.model_fields for item in annotations for member in _members(item))


def _members(annotation: Any) -> list[type[Config]]:
    """The config classes that a value of this type may be."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    if get_origin(annotation) in (dict, list, tuple):
        return []
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        args = args[:1]
    return [member for arg in args for member in _members(arg)]


def _items(annotation: Any) -> list[tuple[str, Any]]:
    """The types of the items of a list, tuple or mapping, each after a word for its key."""
    args = get_args(annotation)
    if get_origin(annotation) is dict:
        return [("<name>", args[1])]
    if get_origin(annotation) in (list, tuple):
        return [("<index>", arg) for arg in args if arg is not Ellipsis]
    return [item for arg in args for item in _items(arg)]


def _types(member: type[Config]) -> tuple[str, ...]:
    """The values of `type` that choose this member of a union."""
    field = member.model_fields.get("type")
    return get_args(field.annotation) if field is not None else ()


def _chosen(members: Sequence[type[Config]], node: object) -> type[Config] | None:
    """The member of a union that the `type` in the values chooses."""
    if len(members) == 1:
        return members[0]
    tag = _tag(node)
    if is_import_path(tag) and LossConfig in members:
        try:
            return user_loss(str(tag)).config_class
        except UserError:
            return None  # which is what the mistake is about
    return next((member for member in members if tag in _types(member)), None)


def _tag(node: object) -> object:
    return node.get("type") if isinstance(node, dict) else None


def _describe(details: ErrorDetails, place: _Place, root: type[Config]) -> str:
    """What is wrong: a requirement that begins with 'must be', or a whole sentence."""
    kind, value, message = details["type"], details["input"], details["msg"]
    path = f"`{'.'.join(place.path)}`" if place.path else "the config"
    tags = [tag for member in place.value_members for tag in _types(member)]
    if kind == "extra_forbidden":
        return _unknown_key(place, root)
    if kind == "missing":
        last = details["loc"][-1]
        if isinstance(last, int):  # an item of a list of fixed length
            return f"{path} must have at least {last + 1} item(s), got {last}"
        return f"{path} is required"
    if kind == "union_tag_not_found":
        return f"{path} must have a `type`, one of {_listed(tags)}"
    if kind == "union_tag_invalid":
        tag = str(value.get("type"))
        alias = TYPE_ALIASES.get(tag.lower().replace("-", "_"), "")
        known = any(alias.startswith(f"`{name}`") for name in tags)
        hint = f"; did you mean {alias}?" if known else _hint(_close(tag, tags))
        return f"{path} must have a `type`, one of {_listed(tags)}, got `{tag}`{hint}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a section of keys and values"
    if kind in ("tuple_type", "list_type"):
        return "must be a list"
    if kind == "too_short":
        least, length = details["ctx"]["min_length"], details["ctx"]["actual_length"]
        return f"{path} must have at least {least} item(s), got {length}"
    if kind == "too_long":
        most, length = details["ctx"]["max_length"], details["ctx"]["actual_length"]
        return f"{path} must have at most {most} item(s), got {length}"
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{path}: {message}" if place.path else message
    if message.startswith("Input should be "):
        # Without the parser's own account of the value, which the sentence shows.
        return re.sub(r", (unable|got) .*$", "", f"must {message.removeprefix('Input should ')}")
    return f"{path} {message}"


def _unknown_key(place: _Place, root: type[Config]) -> str:
    """The sentence about a key that its section does not have, with the likely remedy."""
    *parents, key = place.path
    section = f"in `{'.'.join(parents)}`" if parents else "at the top level"
    if place.section is not None and len(place.members) > 1:
        section += f" (type `{place.tag}`)"
    return f"unknown key `{key}` {section}{_remedy(place, root)}"


def _remedy(place: _Place, root: type[Config]) -> str:
    """What to do about an unknown key: the name that it has here, or the place."""
    *parents, key = place.path
    own = [] if place.section is None else list(place.section.model_fields)
    similar = key.replace("-", "_")
    if similar in own:
        return f"; did you mean `{similar}`?"
    if aliases := _aliases(similar, place):
        return f"; did you mean {_either(aliases)}?"
    if others := _types_with(key, place):
        return f": it belongs to type {_listed(others)}"
    if LossConfig in place.members:
        for alias in ALIASES.get(similar, ()):
            if others := _types_with(alias.partition(".")[0], place):
                return f": it is {_either(ALIASES[similar])} of type {_listed(others)}"
    paths = list(_key_paths(root))
    misplaced = _aliases_in_losses(similar, paths, place.path[0])
    misplaced += [".".join(path) for path in paths if path[-1] == similar][:1]
    if misplaced:
        keys = f" The keys here are {_listed(own)}" if parents and own else ""
        return f"; did you mean {_either(misplaced)}?{keys}"
    return _hint(_close(similar, own)) or f"; its keys are {_listed(own)}"


def _types_with(key: str, place: _Place) -> list[str]:
    """The types of the section that have a key."""
    return [tag for m in place.members if key in m.model_fields for tag in _types(m)]


def _aliases(key: str, place: _Place) -> list[str]:
    """What a key of another project is called here, as far as the section has it."""
    if place.section is None:
        return []
    own = place.section.model_fields
    section = place.path[-2] if len(place.path) > 1 else ""
    found = []
    for path in ALIASES.get(key, ()):
        first, _, rest = path.partition(".")
        if issubclass(place.section, LossConfig) and first in own:
            found.append(path)
        elif first == section and rest.partition(".")[0] in own:
            found.append(rest)
    return found


def _aliases_in_losses(key: str, paths: Sequence[tuple[str, ...]], first: str) -> list[str]:
    """The paths of what a loss calls a key of another project; those below `first` go first."""
    places: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: path[0] != first):
        if path[-3:-1] == ("losses", "<name>"):
            places.setdefault(path[-1], ".".join(path[:-1]))
    aliases = ALIASES.get(key, ())
    return [f"{places[x]}.{alias}" for alias in aliases if (x := alias.partition(".")[0]) in places]


def _key_paths(
    config_class: type[Config], above: tuple[type[Config], ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The path of every key, sections before what is in them; `<name>`, `<index>`: any."""
    if config_class in above:
        return
    fields = config_class.model_fields
    yield from ((name,) for name in fields)
    for name, field in fields.items():
        for prefix, annotation in _nested(field.annotation):
            for member in _members(annotation):
                for path in _key_paths(member, (*above, config_class)):
                    yield (name, *prefix, *path)


def _nested(annotation: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A type and those of its items, each with the keys that lead there."""
    yield (), annotation
    for key, item in _items(annotation):
        for prefix, inner in _nested(item):
            yield (key, *prefix), inner


def _close(key: str, candidates: Sequence[str]) -> str | None:
    """The candidate that a misspelt key most likely meant."""
    return next(iter(get_close_matches(key, candidates, n=1)), None)


def _hint(name: str | None) -> str:
    return "" if name is None else f"; did you mean `{name}`?"


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(value: object) -> str:
    """A value as it would stand in YAML, or what kind of collection it is."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
