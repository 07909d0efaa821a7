"""Names of the fields with prompt and completion, given in place of a format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peftkit.data.records import Record
from peftkit.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of the fields with prompt and completion, given in a recipe.

    Attributes:
        settings: The recipe's keys that name them.
    """

    prompt: str
    completion: str
    settings: tuple[str, str]

    @classmethod
    def of(cls, **settings: str | None) -> FieldNames | None:
        """Return the names that two settings give; None if both are None.

        Raises:
            ConfigError: Only one is None.
        """
        first, second = settings
        prompt, completion = settings.values()
        if prompt is not None and completion is not None:
            return cls(prompt, completion, (f"task.{first}", f"task.{second}"))
        if prompt is not None or completion is not None:
            raise ConfigError(
                f"{first} and {second} are named together or not at all.",
                fix=f"Name both: {first}: question, {second}: answer.",
            )
        return None

    def renamed(self, records: Sequence[Record], where: str) -> list[Record]:
        """Return the records with these two fields only, named `prompt` and `completion`.

        Raises:
            DataError: A record lacks one of the fields.
        """
        needed = {self.prompt, self.completion}
        lacking = [record for record in records if not needed <= record.fields.keys()]
        if lacking:
            raise DataError(
                f"Cannot use {len(lacking)} of {len(records)} rows of {where}.",
                found=f"{lacking[0].source} lacks '{self.prompt}' or '{self.completion}' "
                f"({', '.join(self.settings)}); its fields: "
                f"{', '.join(lacking[0].fields) or 'none'}.",
                fix="Name fields that every row has.",
            )
        pairs = ((r.fields[self.prompt], r.fields[self.completion], r.source) for r in records)
        return [Record({"prompt": p, "completion": c}, source) for p, c, source in pairs]
