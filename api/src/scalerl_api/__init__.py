"""The resource and wire types that all other members share.

::

    run.yaml ──▶ load_run() ──▶ ScaleRLRun ──▶ operator's plan          a problem: SpecError, with the field
    object   ──▶ run_from_object()        └──▶ custom resource definition
    process A ── wire.* messages ──▶ process B                          msgspec, a version in the handshake
    coordinator ── EvaluationPoint ──▶ curve_csv() ──▶ curve.csv, ConfigMap

Lives here: the ``ScaleRLRun`` resource (:mod:`.spec`, with its model and task in :mod:`.source`, mixes in :mod:`.mix`, evaluation sets
in :mod:`.evaluation`, generators and trainer in :mod:`.roles`, checks across its sections in :mod:`.run_rules`, field types in
:mod:`.fields`, what only a cluster uses of it in :mod:`.cluster` and :mod:`.pods`), its status there (:mod:`.status`, :mod:`.conditions`), how a
file or a cluster's object becomes a run or a list of precise errors (:mod:`.load`), what processes of a run say
to each other (:mod:`.wire`, :mod:`.endpoints`), the byte layout of weights on their way (:mod:`.weights`), what
the forecasting sidecar is asked and answers (:mod:`.forecast`), how a process learns where it stands
(:mod:`.process`), where a run keeps its files (:mod:`.paths`), its curve as a table (:mod:`.curve`), and how many bytes its roles need
(:mod:`.memory`).

Never lives here: I/O beyond reading a spec file, torch, a call to Kubernetes, or a decision.
"""
