"""The base of the config classes, and the errors that the user can correct.

Here: `Config`, `UserError`, `ConfigError`. YAML and command-line overrides are in `loading.py`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class UserError(ValueError):
    """A mistake in a config, a file or a record that the user gave.

    The command line reports it without a traceback and exits with code 2, so the message must say
    by itself what is wrong, where, and what was expected.
    """


class ConfigError(UserError):
    """A config that cannot be read or is not valid; the message names each key path."""


class Config(BaseModel):
    """Base of all configs: frozen, unknown keys refused, a docstring under each field.

    A number as text (quoted in YAML, or a string in Python) is accepted for a number's field as
    exactly that number. A boolean is refused wherever the field does not declare one, as Python
    would take `true` for 1. Infinity and NaN are refused; a bound that is off is `None`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    def __init__(self, /, **values: Any) -> None:
        """A config of keyword arguments, whose mistakes are told as those of a file are.

        Raises:
            pydantic.ValidationError: a `ValueError`, with the key path of each mistake, what was
                required, what came, and the likely remedy.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            from fastrl.config.messages import told  # needs this class

            raise told(error, type(self), values) from None

    # Sections inside of others are validated without it, so that mistakes are told once, from the
    # top; the mark is that of pydantic's own `__init__`.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    # On the model: pydantic allows no `before` validator on the field that tells a union apart.
    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        errors = [
            InitErrorDetails(
                type=PydanticCustomError(
                    "boolean", "must not be a boolean, got {found}", {"found": str(found).lower()}
                ),
                loc=(name,),
                input=value,
            )
            for name, value in values.items()
            if name in cls.model_fields and not _admits_booleans(cls.model_fields[name].annotation)
            for found in _booleans(value)
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return values


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise PydanticCustomError("nul", "must not hold the character NUL, which no path can have")
    return path


PathText = Annotated[str, AfterValidator(_without_nul)]
"""A path or a text with one."""


def _booleans(value: object) -> Iterator[bool]:
    """The booleans of a plain value, also those inside its lists and mappings."""
    if isinstance(value, bool):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _booleans(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _booleans(item)


def _admits_booleans(annotation: Any) -> bool:
    """Whether a boolean may stand somewhere in a value of this type.

    A nested config answers for its own fields, so a type that contains one is not searched.
    """
    if annotation in (bool, Any, object):
        return True
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return True
    return any(arg is True or arg is False or _admits_booleans(arg) for arg in get_args(annotation))
