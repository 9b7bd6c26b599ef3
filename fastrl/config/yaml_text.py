"""YAML text to plain values and back. What the values mean is in `loading.py`.

PyYAML follows YAML 1.1, which takes `2e-5` for text, `no` for false and `010` for eight. Here a
plain scalar is what the core schema of YAML 1.2 says: those are a float, a text and ten.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml


class YamlError(ValueError):
    """Text that is not YAML or that fastrl refuses; the message begins with line and column."""


MOST_NODES = 20_000
"""Values and keys of a text, those of an alias counted wherever it stands: a few lines of aliases
of aliases would fill the memory."""

_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INTEGER = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = re.compile(r"^<<$")

_RESOLVERS = (
    ("tag:yaml.org,2002:bool", _BOOLEAN, "tTfF"),
    ("tag:yaml.org,2002:int", _INTEGER, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", _MERGE, "<"),
)


class _Loader(yaml.SafeLoader):
    """Scalars of YAML 1.2; keys are text and stand once in a mapping."""

    # Fresh, so that the resolvers of YAML 1.1 do not apply.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (declared so by PyYAML)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.2 or YAML 1.1 would take for something else; writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))


def _construct_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError as error:  # Python's own limit
        raise yaml.MarkedYAMLError(
            problem=f"an integer of {len(text)} digits is too long", problem_mark=node.start_mark
        ) from error


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if key_node.tag != "tag:yaml.org,2002:str":
            raise yaml.MarkedYAMLError(
                problem="a key must be text; quote it", problem_mark=key_node.start_mark
            )
        if key_node.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key `{key_node.value}` stands twice in one section",
                problem_mark=key_node.start_mark,
            )
        seen.add(key_node.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str) -> Any:
    """The plain value (mappings, lists, scalars) that a YAML text describes.

    Raises:
        YamlError: not YAML, a duplicate key, a key that is not text, or more than `MOST_NODES`.
    """
    try:
        loader = _Loader(text)  # a subclass of SafeLoader: it builds plain values only
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MOST_NODES:
            raise YamlError(
                f"must have at most {MOST_NODES:,} values and keys, those of an alias counted"
                " wherever it stands"
            )
        return loader.construct_document(node)
    except RecursionError as error:
        raise YamlError("must not be nested so deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Number of nodes below and with this one; `sizes` has those that were counted, by identity."""
    key = id(node)
    if key not in sizes:
        sizes[key] = 0  # as long as it is being counted
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        sizes[key] = 1 + sum(_size(child, sizes) for child in children)
    elif not sizes[key]:
        raise yaml.MarkedYAMLError(
            problem="an alias must not stand inside of what it names", problem_mark=node.start_mark
        )
    return sizes[key]


def dump_yaml(value: Any, *, only_ascii: bool = False) -> str:
    """YAML that `parse_yaml` reads back as an equal value; numbers stay numbers.

    Args:
        value: of plain types.
        only_ascii: whether other characters are escaped.
    """
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=not only_ascii,
        default_flow_style=False,
    )
    return text
