"""Check documents against the JSON Schemas in ``schemas/``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.grade import plain


def validate(name: str, document: Any) -> None:
    """`UserError` that names the place and what is wrong there, unless ``document`` is as ``schemas/NAME.json`` says."""
    error = next(iter(_validator(name).iter_errors(document)), None)
    if error is not None:
        where = plain(".".join(str(part) for part in error.instance_path)) or "the whole"
        raise UserError(f"{where}: {plain(error.message)}.")


@cache
def _validator(name: str) -> Any:
    import jsonschema_rs

    schema = (Path(__file__).parent / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    return jsonschema_rs.validator_for(json.loads(schema))
