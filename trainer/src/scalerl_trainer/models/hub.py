"""The size of a model of a hub, of its headers: its weights are not downloaded."""

from __future__ import annotations

from pathlib import Path

from scalerl_api.memory.model_size import ModelSize
from scalerl_api.spec import HubModel
from scalerl_trainer.errors import ModelError, first_line
from scalerl_trainer.models.files import read_json, stored_tensors


def hub_model_size(hub: HubModel) -> ModelSize | None:
    """The size by ``config.json`` and the headers of the weights, from the cache of the hub's client if it has both, else from the hub.

    Returns:
        The size; None if ``config.json`` does not give it.

    Raises:
        ModelError: the hub has no such model of safetensors, refuses it, or cannot be reached.
    """
    import huggingface_hub

    try:
        cached = huggingface_hub.snapshot_download(hub.name, revision=hub.revision, local_files_only=True)
        config = read_json(Path(cached) / "config.json")
        elements = sum(tensor.elements for tensor in stored_tensors(Path(cached)).values())
    except (OSError, ValueError, ModelError):
        try:
            config = read_json(
                Path(huggingface_hub.hf_hub_download(hub.name, "config.json", revision=hub.revision))
            )
            files = huggingface_hub.get_safetensors_metadata(hub.name, revision=hub.revision).files_metadata
        except Exception as error:  # the client raises from several trees: its own, httpx's and OSError
            raise ModelError(
                f"{hub.name} at revision {hub.revision}: {first_line(error)}; check name, revision, network and access token "
                "(HF_TOKEN), or give model.path a folder with config.json and the headers of its weights"
            ) from error
        elements = sum(tensor.parameter_count for file in files.values() for tensor in file.tensors.values())
    return ModelSize.of_config(config, elements)
