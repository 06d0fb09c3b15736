"""What the processes of one run say to each other: msgspec structs, sent as MessagePack.

Every request to the coordinator carries the run's bearer token and the header
``x-scalerl-wire: <WIRE_VERSION>``; another version is refused with 426 and both numbers.
Token ids travel as little-endian int32 bytes and log-probabilities as little-endian float32
bytes, so that nobody decodes them who does not need them.

Vocabulary
    slot      position in the run's one sequence of training prompts; step ``t`` consumes slots
              ``[t·B, (t+1)·B)`` with ``B = promptsPerStep``, so a batch's prompts never depend on timing;
              where ``B`` changes under way, steps that are not closed yet are cut by the new one.
    version   number of optimizer updates the weights have seen; step ``t`` turns version ``t`` into ``t+1``.
    lease     one slot (or one evaluation prompt) handed to one generator until its deadline.
    group     all completions of one lease. A rollout is one completion.
    prompt    named by a :class:`~.prompts.PromptRef`: task, split, index.
    verdict   a verifier's result for one completion, a score and named parts; a group has :class:`~.verdicts.Verdicts`.

One module for each who speaks: :mod:`.actor` (and :mod:`.responses`), :mod:`.trainer` (to the coordinator), :mod:`.control` (trainer to actor)
and :mod:`.watching` (anyone); everything is to be had from here.
"""

from scalerl_api.wire.actor import (
    MASKED,
    Completion,
    Group,
    Heartbeat,
    Lease,
    LeaseRequest,
    Leases,
    Partial,
    PartialGroup,
    Partials,
    PartialsReply,
    Push,
    PushReply,
    PushResult,
    Register,
    Registered,
    Release,
    ReleaseCause,
    VersionSpan,
)
from scalerl_api.wire.base import (
    CONTENT_TYPE,
    WIRE_HEADER,
    WIRE_VERSION,
    Ack,
    Member,
    Problem,
    Struct,
)
from scalerl_api.wire.control import (
    GroupJoin,
    Probe,
    Probed,
    TensorSpec,
    WeightReceive,
    WeightReceived,
)
from scalerl_api.wire.prompts import HELD_OUT_SET, MAIN_TASK, MEAN_SET, PromptRef, Split
from scalerl_api.wire.responses import (
    MAX_RESPONSES_BYTES,
    PastResponse,
    Responses,
    ResponsesRequest,
    prompt_digest,
)
from scalerl_api.wire.trainer import (
    CheckpointBegin,
    CheckpointCommit,
    CheckpointSnapshot,
    GroupMeta,
    Next,
    NextAction,
    NextRequest,
    PublishBegin,
    PublishCommit,
    PublishPermit,
    Sequence,
    Shard,
    ShardRequest,
    StepReport,
    StepReported,
    SupervisedReport,
    SupervisedReported,
    TrainerHello,
    TrainerWelcome,
    trained_tokens,
)
from scalerl_api.wire.verdicts import Verdicts
from scalerl_api.wire.watching import (
    BROKEN,
    FORECAST,
    INTERRUPTED,
    Counts,
    DecisionLine,
    DecisionLines,
    EvaluationPoint,
    LabelMean,
    Mismatch,
    PassAt,
    Phase,
    Status,
    Stop,
    Tracker,
)

__all__ = [
    "BROKEN",
    "CONTENT_TYPE",
    "FORECAST",
    "HELD_OUT_SET",
    "INTERRUPTED",
    "MAIN_TASK",
    "MASKED",
    "MAX_RESPONSES_BYTES",
    "MEAN_SET",
    "WIRE_HEADER",
    "WIRE_VERSION",
    "Ack",
    "CheckpointBegin",
    "CheckpointCommit",
    "CheckpointSnapshot",
    "Completion",
    "Counts",
    "DecisionLine",
    "DecisionLines",
    "EvaluationPoint",
    "Group",
    "GroupJoin",
    "GroupMeta",
    "Heartbeat",
    "LabelMean",
    "Lease",
    "LeaseRequest",
    "Leases",
    "Member",
    "Mismatch",
    "Next",
    "NextAction",
    "NextRequest",
    "Partial",
    "PartialGroup",
    "Partials",
    "PartialsReply",
    "PassAt",
    "PastResponse",
    "Phase",
    "Probe",
    "Probed",
    "Problem",
    "PromptRef",
    "PublishBegin",
    "PublishCommit",
    "PublishPermit",
    "Push",
    "PushReply",
    "PushResult",
    "Register",
    "Registered",
    "Release",
    "ReleaseCause",
    "Responses",
    "ResponsesRequest",
    "Sequence",
    "Shard",
    "ShardRequest",
    "Split",
    "Status",
    "StepReport",
    "StepReported",
    "Stop",
    "Struct",
    "SupervisedReport",
    "SupervisedReported",
    "TensorSpec",
    "Tracker",
    "TrainerHello",
    "TrainerWelcome",
    "Verdicts",
    "VersionSpan",
    "WeightReceive",
    "WeightReceived",
    "prompt_digest",
    "trained_tokens",
]
