"""Losses that are no part of the package: their `type` is the import path of their class."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import PlainValidator, SerializeAsAny, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

from fastrl.config.base import UserError
from fastrl.config.import_path import import_class, is_import_path
from fastrl.config.loss_options import LossConfig


class ConfiguredLoss:
    """The base of `fastrl.layers.losses.LanguageModelLoss`, as far as it needs no torch.

    Attributes:
        config_class: class of the loss's config: what a subclass says itself, or the parameter of
            its base, as in `LanguageModelPolicyGradientLoss[MyLossConfig]`.
    """

    config_class: ClassVar[type[LossConfig]]

    def __init_subclass__(cls, **options: Any) -> None:
        """Takes the config's class from the parameter of a generic base."""
        super().__init_subclass__(**options)
        if "config_class" in cls.__dict__:
            return
        for base in cls.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, LossConfig):
                    cls.config_class = argument


def user_loss(path: str) -> type[ConfiguredLoss]:
    """The loss class at an import path.

    Raises:
        UserError: as `import_class`, or a class that is not a loss, not complete or without a
            config of its own.
    """
    found = import_class(path)
    if not issubclass(found, ConfiguredLoss):
        raise UserError(
            "must name a subclass of `fastrl.layers.losses.LanguageModelLoss`, got"
            f" `{path}`, which is none"
        )
    if abstract := sorted(getattr(found, "__abstractmethods__", ())):
        lacks = ", ".join(f"`{name}`" for name in abstract)
        raise UserError(f"must name a loss that can be made, but `{path}` does not define {lacks}")
    config_class = getattr(found, "config_class", None)
    field = None if config_class is None else config_class.model_fields.get("type")
    if field is None or field.annotation is not str:
        raise UserError(
            f"must name a loss with a config of its own, but `{path}` has "
            + ("none" if config_class is None else f"{config_class.__name__} without `type: str`")
            + "; set `config_class` to a subclass of `fastrl.config.LossConfig` with a field"
            f' `type: str = "{path}"`'
        )
    return found


def loss_tag(value: object) -> str:
    """`built_in`, or `imported` for a loss whose `type` is an import path."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "imported" if is_import_path(kind) else "built_in"


def _validated(value: Any) -> LossConfig:
    kind = value["type"] if isinstance(value, Mapping) else value.type
    try:
        config_class = user_loss(kind).config_class
    except UserError as error:
        problem = PydanticCustomError("import_path", "{problem}", {"problem": str(error)})
        details = InitErrorDetails(type=problem, loc=("type",), input=kind)
        raise ValidationError.from_exception_data("loss", [details]) from error
    return config_class.model_validate(value)


UserLossConfig = Annotated[
    LossConfig,
    PlainValidator(_validated),
    SerializeAsAny(),
    WithJsonSchema(
        {
            "type": "object",
            "description": "A loss of the user's own, with the fields of its `config_class`.",
            "properties": {
                "type": {
                    "type": "string",
                    "pattern": ":",
                    "description": "Import path of the loss's class, `my_package.losses:MyLoss` or "
                    "`path/to/file.py:MyLoss`, relative to the current folder.",
                }
            },
            "required": ["type"],
        }
    ),
]
"""The config of a loss by import path, validated by its class."""
