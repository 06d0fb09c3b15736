"""The CustomResourceDefinition, from the models of :mod:`scalerl_api`. Nothing here runs in the operator's process.

``generate`` writes the schema by pydantic; ``cel_rules`` has the rules that a schema cannot express.
"""

from scalerl_operator.crd.cel_rules import NotExpressible
from scalerl_operator.crd.generate import FILE_NAME, definition, schema_of, text

__all__ = ["FILE_NAME", "NotExpressible", "definition", "schema_of", "text"]
