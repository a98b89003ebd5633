"""Conversion of a JSON schema to a GBNF grammar."""

from __future__ import annotations

import json

from oallama.core.errors import UsageError


def grammar_of_schema(schema: str) -> str:
    """GBNF, as llama-cpp-python makes it. Raises UsageError for what is no JSON, or a schema that it cannot express."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        if not isinstance(json.loads(schema), dict):
            raise UsageError('the JSON schema is no JSON object; give one such as {"type": "object"}')
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    try:
        grammar: str = json_schema_to_gbnf(schema)
    except Exception as error:  # it asserts, and raises what it likes
        why = " ".join(str(error).split()).removesuffix(" (use --allow-fetch for force)")  # an option of its own tool
        raise UsageError(f"the JSON schema cannot be made a grammar: {why or type(error).__name__}") from None
    return grammar
