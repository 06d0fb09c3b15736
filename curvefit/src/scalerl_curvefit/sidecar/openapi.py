"""The OpenAPI document, generated from the wire types."""

from __future__ import annotations

from typing import Any

import msgspec

from scalerl_api import forecast as wire


def document() -> dict[str, Any]:
    """OpenAPI 3.1 of both endpoints."""
    _, schemas = msgspec.json.schema_components(
        [
            wire.FitRequest,
            wire.FitAnswer,
            wire.ForecastRequest,
            wire.ForecastAnswer,
            wire.ErrorAnswer,
        ],
        ref_template="#/components/schemas/{name}",
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "scalerl curve fit",
            "version": "1",  # version of the paths below /v1, not of the package
            "description": "Fits and forecasts compute–reward curves. Stateless and deterministic.",
        },
        "paths": {
            wire.FIT: {"post": _operation("Fit the last segment of a curve", "FitRequest", "FitAnswer")},
            wire.FORECAST: {
                "post": _operation("Fit, guard, forecast", "ForecastRequest", "ForecastAnswer"),
            },
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "if the sidecar runs with --token-file",
                }
            },
        },
        "security": [{}, {"token": []}],
    }


def _operation(summary: str, request: str, answer: str) -> dict[str, Any]:
    def body(name: str) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}

    refusals = {
        "400": "not a request of this type",
        "401": "wrong token",
        "413": "body too large",
        "415": "a body with a content encoding",
        "422": "points that cannot be fitted, or an invalid request; `code` is the reason",
        "503": "busy, or out of time; retry after `retry-after` seconds",
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, **body(request)},
        "responses": {
            "200": {"description": "answered", **body(answer)},
            **{status: {"description": text, **body("ErrorAnswer")} for status, text in refusals.items()},
        },
    }
