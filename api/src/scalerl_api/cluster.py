"""Sections of the spec that only a cluster uses: the run's volume and images. The local runtime ignores both."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from scalerl_api.fields import ClaimQuantity, Matches, Model, Rule
from scalerl_api.pods import ObjectName


class StorageSpec(Model):
    """The volume of a run, with all of its files if all pods mount it. Ignored by the local runtime."""

    claim_name: ObjectName | None = None
    """An existing claim, in which the run uses a directory with its name; default: the operator creates
    ``<run>-data``."""
    size: ClaimQuantity = "10Gi"
    """Size of the created claim: checkpoints × (weights + optimizer state), and the prepared model. Can be raised
    if the StorageClass allows expansion."""
    storage_class_name: ObjectName | None = None
    """StorageClass of the created claim; default: that of the cluster."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """Access mode of the created claim; ``ReadWriteOnce`` is sufficient if all pods of a run are on one node, or with
    ``mountedBy: Coordinator``."""
    mounted_by: Literal["AllPods", "Coordinator"] = "AllPods"
    """Pods that mount the claim. ``Coordinator``: each other pod has an emptyDir, and gets the prepared model from
    ``checkpoint.to``, where the trainer's files are too. The preparation, and before the roles start an init container with the
    trainer's image, access it with the variables of ``trainer.podTemplate.env``."""
    on_delete: Literal["Retain", "Delete"] = "Retain"
    """Whether the created claim is kept or deleted with the run."""

    rules = (
        Rule(
            "!has(self.claimName) || !has(self.storageClassName)",
            "storageClassName has no effect on an existing claim: leave out one of storageClassName and claimName",
            "storageClassName",
            lambda storage: storage.claim_name is None or storage.storage_class_name is None,
        ),
        Rule(
            "!has(self.claimName) || self.onDelete == 'Retain'",
            "onDelete: Delete is for the operator's own claim; one given by claimName is kept",
            "onDelete",
            lambda storage: storage.claim_name is None or storage.on_delete == "Retain",
        ),
    )


Image = Annotated[
    str,
    Field(min_length=1, max_length=512),
    AfterValidator(
        Matches(
            r"^[^\s:]+(:[^\s/]\S*)?$",
            "must be an image's name, without spaces and without https:// before it",
        )
    ),
]


class ImagesSpec(Model):
    """Container images of the roles; default: the operator's settings. Ignored by the local runtime."""

    trainer: Image | None = None
    """Image of the trainer and of the preparation."""
    generator: Image | None = None
    """Image of both containers of a generator."""
    coordinator: Image | None = None
    """Image of the coordinator."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Pull policy of the images; default: the operator's setting."""
