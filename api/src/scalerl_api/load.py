"""Parses a YAML file or an object into a :class:`~scalerl_api.spec.ScaleRLRun`, or reports a list of precise problems."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from scalerl_api.edits import flat
from scalerl_api.environment import USE_VERIFIER
from scalerl_api.recipe import RecipeSpec
from scalerl_api.recipe.presets import completed
from scalerl_api.spec import KIND, RunSpec, ScaleRLRun


@dataclass(frozen=True)
class SpecProblem:
    """One problem of a run file."""

    where: str
    """Path of the field, or ``line n``."""
    message: str
    hint: str = ""
    """What to do, or the given value."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class SpecError(Exception):
    """A run file is invalid; ``problems`` lists all problems found."""

    def __init__(self, source: str, problems: list[SpecProblem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys (YAML would silently keep the last one) and names every invalid value. It refuses
    the character NUL, which no path, environment variable or argument of a process can have."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            # The library's constructors raise these without a position: a 13th month, `!!int abc`.
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} is no {kind}; put text in quotes", node.start_mark
            ) from error

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        if "\0" in text:
            raise yaml.constructor.ConstructorError(
                None, None, f"{text!r:.200} has the character NUL; leave it out", node.start_mark
            )
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} given twice (first on line {seen[key]})", key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


def load_run(path: Path) -> ScaleRLRun:
    """Read and validate one run file.

    Raises:
        SpecError: the file is unreadable, no YAML, not exactly one object, or has invalid fields.
    """
    return parse_run(_text(path), str(path))


def load_accepted_run(path: Path) -> ScaleRLRun:
    """Read a run file written by the operator, whose spec some release has accepted; see :func:`accepted_run`.

    Raises:
        SpecError: the file is unreadable, no YAML, or not exactly one object with ``metadata`` and ``spec``.
    """
    return accepted_run(_document(_text(path), str(path)))


def _text(path: Path) -> str:
    source = str(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            source, [SpecProblem("file", error.strerror or str(error), "check the path")]
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(source, [SpecProblem(f"byte {error.start}", "not UTF-8 text")]) from error


def parse_run(text: str, source: str) -> ScaleRLRun:
    """Validate the text of one run file; ``source`` is its name in errors."""
    return _validated(_document(text, source), source)


def parse_objects(text: str, source: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of a file with any number of YAML documents, as written; ``source`` is its name in errors.

    Raises:
        SpecError: the text is no YAML, or has no object or something else.
    """
    documents = _documents(text, source)
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise SpecError(source, [SpecProblem("file", "expected Kubernetes objects, one per document")])
    return documents


def _documents(text: str, source: str) -> list[Any]:
    try:
        return [d for d in yaml.load_all(text, Loader=_StrictLoader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
        raise SpecError(source, [SpecProblem(where, error.problem or "not valid YAML")]) from error
    except yaml.YAMLError as error:
        raise SpecError(source, [SpecProblem("file", f"not valid YAML: {error}")]) from error
    except RecursionError as error:
        raise SpecError(source, [SpecProblem("file", "nested too deeply to be read")]) from error


def _document(text: str, source: str) -> dict[str, Any]:
    documents = _documents(text, source)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        found = f"{len(documents)} documents" if len(documents) != 1 else type(documents[0]).__name__
        raise SpecError(source, [SpecProblem("file", f"expected one {KIND} object, found {found}")])
    document: dict[str, Any] = documents[0]
    return document


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """A manifest as YAML that every parser reads equally.

    PyYAML parses an unquoted ``1e-15`` as text, but ``kubectl`` as a float, which no spec may contain. Therefore text that
    looks like a number is quoted.

    >>> to_yaml({"epsilon": "1e-15", "keep": 2})
    "epsilon: '1e-15'\\nkeep: 2\\n"
    """
    dumped: str = yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return dumped


class _Dumper(yaml.SafeDumper):
    """Quotes text that looks like a number, and writes repeated values in full, because some parsers do not support anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        number = re.fullmatch(r"[-+.0-9eE]+", data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="'" if number else None)


_Dumper.add_representer(str, _Dumper.represent_str)

_METADATA = ("name", "namespace", "labels", "annotations")
_MAX_PLACES = 3
"""Fields of one name that the message about an unknown one lists."""


def run_from_object(obj: Mapping[str, Any]) -> ScaleRLRun:
    """Validate one object from the API server.

    The result keeps name, namespace, labels and annotations of the metadata; fields added by the server and ``status`` are
    dropped. The spec must satisfy the same rules as that of a file, and its paths must be absolute, because a pod has no
    directory of the run file.

    Raises:
        SpecError: the object has invalid fields; the source of the error is ``namespace/name``.
    """
    metadata = obj.get("metadata")
    if not isinstance(metadata, Mapping):
        raise SpecError(KIND, [SpecProblem("metadata", "required, but not given")])
    kept = {key: metadata[key] for key in _METADATA if metadata.get(key) is not None}
    document = {key: value for key, value in obj.items() if key != "status"} | {"metadata": kept}
    source = f"{metadata.get('namespace') or 'default'}/{metadata.get('name') or '?'}"
    run = _validated(document, source)
    paths = {"spec.model.path": run.spec.model.path} | data_paths(run.spec)
    relative = [
        SpecProblem(where, "must be absolute on a cluster", f"got {path!r}")
        for where, path in paths.items()
        if path is not None and not path.startswith("/")
    ]
    if relative:
        raise SpecError(source, relative)
    return run


def data_paths(spec: RunSpec) -> dict[str, str | None]:
    """Paths of data files and of verifiers' code, by path of the field; None of code in an installed module."""
    found: dict[str, str | None] = {}
    for field, task in spec.tasks_by_field.items():
        found |= {f"{field}.{task.source_field}.{name}": path for name, path in task.source.paths.items()}
        for at, one in enumerate(task.scoring):
            where = f"{field}.verifier" if task.verifier is not None else f"{field}.verifiers[{at}]"
            if one.python is not None:
                found[f"{where}.python.path"] = one.python.path
        if task.environment is not None and task.environment.python is not None:
            found[f"{field}.environment.python.path"] = task.environment.python.path
        if task.environment is not None:
            found |= {
                f"{field}.environment.{name}": path for name, path in task.environment.tool_files.items()
            }
    warm = spec.warm_start
    if warm is not None and warm.source is not None:
        found |= {f"spec.{warm.own}.{name}": path for name, path in warm.source.paths.items()}
    return found


def accepted_run(obj: Mapping[str, Any]) -> ScaleRLRun:
    """Parse an object whose spec was accepted before, perhaps by a release with other rules.

    Like :func:`run_from_object`, but a spec that violates a rule of this release is used unchanged.

    Raises:
        SpecError: the object has no ``metadata`` or no ``spec``.
    """
    try:
        return run_from_object(obj)
    except SpecError:
        if not all(isinstance(obj.get(part), Mapping) for part in ("metadata", "spec")):
            raise
        metadata = {key: value for key, value in obj["metadata"].items() if key in _METADATA}
        run: ScaleRLRun = _as_it_is(ScaleRLRun, {**obj, "metadata": metadata})
        return run


def lost_data_fields(spec: Mapping[str, Any]) -> list[SpecProblem]:
    """Fields of a stored spec that this release does not have and whose values chose other data: with them, the run cannot continue.

    Values that are now constants are no problem; other removed fields change no data, and :func:`accepted_run` drops them.
    """
    return [
        SpecProblem(
            path,
            f"is {value!r}, and this release has only {_LOST[lost[0]]!r}, with which the run would have other prompts",
            "finish it with the release that began it, or start a new run",
        )
        for path, value in flat(spec, "spec")
        if (lost := _LOST_FIELD.search(path))
        and value not in (None, _LOST[lost[0]])
        and ".parameters." not in path
    ]


_LOST: Mapping[str, object] = {
    ".heldOut.seed": 0,
    ".task.seed": 0,
    ".dataset.filter.duplicates": "Drop",
}
_LOST_FIELD = re.compile("|".join(f"{re.escape(path)}$" for path in _LOST))


def _as_it_is(model: type[BaseModel], given: Mapping[str, Any]) -> Any:
    """The model with the values of ``given``, even if they violate a rule; unknown fields are dropped.

    What continues a run asks :func:`lost_data_fields` first.
    """
    values: dict[str, Any] = {}
    if model is RecipeSpec:
        given = completed(given)
    for name, field in model.model_fields.items():
        value = given.get(field.alias or name)
        if value is None:
            continue
        nested = _model_in(field.annotation)
        if nested is not None and isinstance(value, Mapping):
            value = _as_it_is(nested, value)
        elif nested is not None and isinstance(value, list):
            value = [_as_it_is(nested, item) for item in value]
        else:
            try:
                value = _of_field(model, name).validate_python(value, by_alias=True, by_name=False)
            except ValidationError:
                # A decimal or a quantity may be given as an integer; the code that uses it expects text.
                if type(value) is int and _is_text(field.annotation):
                    value = str(value)
        values[name] = value
    return model.model_construct(**values)


def _is_text(annotation: Any) -> bool:
    return annotation is str or any(_is_text(part) for part in get_args(annotation))


@functools.cache
def _of_field(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = model.model_fields[name]
    checked: Any = Annotated[(field.annotation, Field(), *field.metadata)]
    return TypeAdapter(checked, config=ConfigDict(strict=True))


def _validated(document: dict[str, Any], source: str) -> ScaleRLRun:
    try:
        # By its names in YAML alone: admission policies know no other ones.
        return ScaleRLRun.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SpecError(source, list(_problems(error))) from error


def _problems(error: ValidationError) -> Iterator[SpecProblem]:
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        where = ".".join(location) or "file"
        if item["type"] == "extra_forbidden" and location[-1] == "mix" and "mix" in location[:-1]:
            yield SpecProblem(
                where,
                "a task of a mix cannot be a mix",
                "list its tasks in task.mix, each with the product of the weights",
            )
        elif item["type"] == "extra_forbidden":
            parent = [part for part in location[:-1] if not part.isdigit()]  # without places in lists
            names = _field_names(ScaleRLRun, parent)
            close = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
            places = list(_places(location[-1], ScaleRLRun))
            within = [place for place in places if place.startswith(".".join(parent) + ".")]
            meant = (within or places) if len(within or places) <= _MAX_PLACES else []
            others = f"known here: {', '.join(sorted(names))}" if names else "leave it out"
            hint = f"did you mean {' or '.join(meant or close)}?" if meant or close else others
            yield SpecProblem(where, "unknown field", hint)
        elif item["type"] == "missing":
            yield SpecProblem(where, "required, but not given")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            hint = (
                f"got {given!r:.200}"
                if isinstance(given, str | int | float | bool) and repr(given) not in message
                else _meant_environment(message, given)
            )
            yield SpecProblem(where, message, hint)


def _meant_environment(message: str, given: Any) -> str:
    """Of a task with a verifier and an environment: the name of one that uses a verifier, if its own is close to it."""
    environment = given.get("environment") if isinstance(given, dict) else None
    name = environment.get("name") if isinstance(environment, dict) else None
    if not message.startswith(("give exactly one of verifier", "give verifier")) or not isinstance(name, str):
        return ""
    close = difflib.get_close_matches(name, set(USE_VERIFIER) - {name}, n=1)
    return f"environment.name is {name!r}: did you mean {close[0]!r}?" if close else ""


def _field_names(model: type[BaseModel], location: list[str]) -> list[str]:
    """Aliases of the fields of the model at ``location``."""
    for part in location:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        nested = None if field is None else _model_in(field.annotation)
        if nested is None:
            return []
        model = nested
    return [field.alias or name for name, field in model.model_fields.items()]


def _places(name: str, model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Paths of all fields that YAML calls ``name``."""
    for python_name, field in model.model_fields.items():
        alias = field.alias or python_name
        if alias == name:
            yield at + alias
        if (nested := _model_in(field.annotation)) is not None:
            yield from _places(name, nested, f"{at}{alias}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a field, optional or not, or of the items of its list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
