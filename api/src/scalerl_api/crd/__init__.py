"""The CustomResourceDefinition, generated from the models of :mod:`scalerl_api`; written to ``crds/`` by ``make crds``, used by no process.

``generate`` has the schema, by pydantic; ``cel_rules`` has the rules that a schema cannot express.
"""

from scalerl_api.crd.generate import FILE_NAME, definition, schema_of, text

__all__ = ["FILE_NAME", "definition", "schema_of", "text"]
