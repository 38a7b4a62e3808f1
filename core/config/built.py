"""What a configuration asks for that is known but not built."""

from collections.abc import Iterator

from core.config.base import NotBuilt, Section
from core.config.experiment import Config


def not_built(config: Config) -> list[str]:
    """One line for each key whose value is known but not built; plan refuses them by name."""
    lines = [f"{key}: {_shown(value)} is known but not built" for key, value in _marked(config, "")]
    for name in ("rollout", "actor"):
        if getattr(config, name).scheduling_strategy.type == "colocation":
            lines.append(f"{name}.scheduling_strategy.type: colocation is known but not built")
    return lines


def _marked(section: Section, prefix: str) -> Iterator[tuple[str, object]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        mark = next((item for item in field.metadata if isinstance(item, NotBuilt)), None)
        if mark is not None:
            allowed = mark.built or (field.default,)
            if value not in allowed:
                yield prefix + name, value
                continue
        if isinstance(value, Section):
            yield from _marked(value, f"{prefix}{name}.")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "this section" if isinstance(value, Section) else str(value)
