"""YAML files and `key.path=value` overrides to configs, and configs back to YAML.

Every mistake is one `ConfigError` that names the file or override, the key path and the remedy.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from fastrl.config.base import Config, ConfigError
from fastrl.config.messages import mistakes
from fastrl.config.yaml_text import YamlError, dump_yaml, parse_yaml

ConfigType = TypeVar("ConfigType", bound=Config)


def load_config(
    config_class: type[ConfigType], path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> ConfigType:
    """The config that a YAML file and the overrides describe, later overrides last.

    Args:
        config_class: what the file is to be read as.
        path: the file.
        overrides: `key.path=value`, the value in YAML; an index counts from 0, as in
            `phases.1.steps=20`.

    Raises:
        ConfigError: a file that cannot be read, is not YAML or not a mapping, has an unknown key or
            a value that its key does not take, or an override that does not fit the file.
    """
    return parse_config(config_class, read_mapping(path), overrides, source=os.fspath(path))


def parse_config(
    config_class: type[ConfigType],
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str = "config",
) -> ConfigType:
    """The config that plain values and the overrides describe.

    Args:
        config_class: what the values are to be read as.
        values: mappings, lists and scalars, as from YAML; left as they are.
        overrides: as in `load_config`.
        source: what an error message names as the origin of the values.

    Raises:
        ConfigError: as in `load_config`.
    """
    parsed = [_parse_override(text) for text in overrides]
    merged: Any = _copy(values)
    for override in parsed:
        merged = _apply(merged, override, override.keys, config_class)
    try:
        return config_class.model_validate(merged)
    except ValidationError as error:
        listed, num_others = mistakes(error, config_class, merged)
        lines = [f"{_origin(mistake.path, parsed) or source}: {mistake.text}" for mistake in listed]
        if num_others:
            lines.append(f"and {num_others:,} more")
        raise ConfigError("\n".join(lines)) from error


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain values of a YAML file whose top level is a mapping; `{}` for an empty file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    name = os.fspath(path)
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: must be UTF-8 text: {error.reason}") from error
    except YamlError as error:
        raise ConfigError(f"{name}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: must be a mapping of keys to values at its top level")
    return values


def dump_config(config: Config, *, only_ascii: bool = False) -> str:
    """The whole config as YAML, defaults included; it loads back as an equal config.

    Args:
        config: of any kind.
        only_ascii: whether other characters are escaped.
    """
    return dump_yaml(config.model_dump(mode="json"), only_ascii=only_ascii)


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes `dump_config` to a file, which appears complete or not at all."""
    temporary = Path(f"{os.fspath(path)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(dump_config(config))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Override(NamedTuple):
    """A change of one value from the command line.

    Attributes:
        text: as given.
        keys: keys and list indices from the top of the config.
        value: the plain value.
    """

    text: str
    keys: tuple[str, ...]
    value: Any


def _parse_override(text: str) -> _Override:
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override `{text}`: must read `key.path=value`")
    try:
        return _Override(text, keys, parse_yaml(value))
    except YamlError as error:
        raise ConfigError(f"override `{text}`: its value is not YAML: {error}") from error


def _apply(
    node: Any, override: _Override, keys: tuple[str, ...], section_class: type[Config] | None
) -> Any:
    """`node` with the override's value at `keys`, and with the sections that were missing.

    A section that is made gets the `type` that the config has by default there, so that
    `rope.theta=5e5` changes the default `rope` and need not choose it first.
    """
    if not keys:
        return override.value
    key, rest = keys[0], keys[1:]
    above = ".".join(override.keys[: len(override.keys) - len(keys)])
    if node is None or isinstance(node, dict):
        section = _new_section(section_class) if node is None else node
        inner = _section_class(section_class, key)
        section[key] = _apply(section.get(key), override, rest, inner)
        return section
    if not isinstance(node, list):
        raise ConfigError(f"override `{override.text}`: `{above}` is a value and has no keys")
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(
            f"override `{override.text}`: `{above}` is a list of {len(node)}, so `{key}` must be an"
            f" index from 0 to {len(node) - 1}"
        )
    node[int(key)] = _apply(node[int(key)], override, rest, None)
    return node


def _section_class(parent: type[Config] | None, key: str) -> type[Config] | None:
    """The class that the section `key` has by default, None where there is none."""
    field = parent.model_fields.get(key) if parent is not None else None
    if field is None:
        return None
    for candidate in (type(field.default), field.default_factory, field.annotation):
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None


def _new_section(section_class: type[Config] | None) -> dict[str, Any]:
    field = section_class.model_fields.get("type") if section_class is not None else None
    return {} if field is None or field.is_required() else {"type": field.default}


def _copy(value: Any) -> Any:
    """The value with mappings and lists of its own, which overrides may change."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _origin(path: str, overrides: Sequence[_Override]) -> str | None:
    """The override that set the value at a path, the last of them; None if none did."""
    for override in reversed(overrides):
        keys = ".".join(override.keys)
        if path == keys or path.startswith(f"{keys}."):
            return f"override `{override.text}`"
    return None
