"""Messages between the processes of one run: msgspec structs, sent as MessagePack.

Every request to the coordinator has the run's bearer token and the header ``x-scalerl-wire: <WIRE_VERSION>``; the
coordinator rejects another version with status 426 and both numbers. Token ids are sent as little-endian int32 bytes and
log-probabilities as little-endian float32 bytes, so that only processes that use them decode them.

Vocabulary
    slot      position in the run's sequence of training prompts; step ``t`` consumes slots
              ``[t·B, (t+1)·B)`` with ``B = promptsPerStep``, so a batch's prompts never depend on timing.
              If ``B`` changes during a run, it applies to all steps that are not closed yet.
    version   number of optimizer updates applied to the weights; step ``t`` turns version ``t`` into ``t+1``.
    lease     assignment of one slot (or one evaluation prompt) to one generator until a deadline.
    group     all completions of one lease. A rollout is one completion.
    prompt    identified by a :class:`~.prompts.PromptRef`: task, split, index.
    verdict   a verifier's result for one completion, a score and named parts; a group has :class:`~.verdicts.Verdicts`.

One module per sender: :mod:`.actor` and :mod:`.responses` (actor to coordinator), :mod:`.trainer` (trainer to coordinator),
:mod:`.control` (trainer to actor) and :mod:`.watching` (any client to coordinator). This package exports all messages.
"""

from scalerl_api.wire.actor import (
    MASKED,
    MAX_ROUTED_BYTES,
    MAX_TEXT_BYTES,
    Completion,
    Group,
    GroupText,
    Heartbeat,
    Lease,
    LeaseRequest,
    Leases,
    MessageSpan,
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
    RoutedExperts,
    Sample,
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
    Uploads,
)
from scalerl_api.wire.control import (
    GroupJoin,
    Probe,
    Probed,
    TensorSpec,
    WeightFiles,
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
    CheckpointFailed,
    CheckpointSnapshot,
    ExportsReport,
    ExportsReported,
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
    TrainedSequence,
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
