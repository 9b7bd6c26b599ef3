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
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


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
    """Returns the plain value (mappings, lists, scalars) that a YAML text describes.

    Raises:
        YamlError: not YAML, a duplicate key, or a key that is not text.
    """
    try:
        # A subclass of SafeLoader: it builds plain values only.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error


def dump_yaml(value: Any) -> str:
    """Returns YAML that `parse_yaml` reads back as an equal value; numbers stay numbers."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return text
