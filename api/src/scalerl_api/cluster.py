"""What only a cluster uses of a run: its volume and its images. The local runtime ignores both."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from scalerl_api.fields import ClaimQuantity, Matches, Model, Rule
from scalerl_api.pods import ObjectName


class StorageSpec(Model):
    """The volume that all pods of a run share, with everything the run writes. Ignored by the local runtime."""

    claim_name: ObjectName | None = None
    """A claim that exists, used below a folder of the run's name; without one the operator makes ``<run>-data``."""
    size: ClaimQuantity = "10Gi"
    """Of the claim that the operator makes: checkpoints × (weights + optimizer state), and the prepared model. It can be
    raised where the StorageClass allows expansion."""
    storage_class_name: ObjectName | None = None
    """Of the claim that the operator makes; none: the cluster's default."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """Of the claim that the operator makes; ``ReadWriteOnce`` works where all pods of a run land on one node."""
    on_delete: Literal["Retain", "Delete"] = "Retain"
    """What becomes of the claim that the operator made once the run is deleted."""

    rules = (
        Rule(
            "!has(self.claimName) || !has(self.storageClassName)",
            "storageClassName says nothing about a claim that exists: leave out it or claimName",
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
    """Container images of the roles; what is not given is the operator's own setting. Ignored by the local runtime."""

    trainer: Image | None = None
    """Of the trainer, and of the preparation before it."""
    generator: Image | None = None
    """Of both containers of a generator."""
    coordinator: Image | None = None
    """Of the coordinator."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the images are pulled; none: the operator's setting."""
