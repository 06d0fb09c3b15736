"""The resource and wire types that all other packages share.

::

    run.yaml ──▶ load_run() ──▶ ScaleRLRun ──▶ the lifecycle's plan     a problem: SpecError, with the field
    object   ──▶ run_from_object()        └──▶ crd.definition()
    process A ── wire.* messages ──▶ process B                          msgspec, a version in the handshake
    coordinator ── EvaluationPoint ──▶ curve_csv() ──▶ curve.csv, ConfigMap

Contents:

- the ``ScaleRLRun`` resource: :mod:`.spec`, with the model in :mod:`.model_source`, tasks in :mod:`.source` (:mod:`.dataset_source`,
  :mod:`.verifier`, :mod:`.environment`), mixes in :mod:`.mix`, evaluation sets in :mod:`.evaluation`, the roles in
  :mod:`.generator_spec`, :mod:`.trainer_spec` (adapters: :mod:`.lora`), :mod:`.coordinator_spec` and :mod:`.environment_server`, the
  transfer of weights in :mod:`.weight_sync`, checks across sections in :mod:`.run_rules`, field types in :mod:`.fields`, and the sections
  for clusters in :mod:`.cluster` and :mod:`.pods`;
- its status on a cluster: :mod:`.status`, :mod:`.conditions`, :mod:`.reasons`;
- the custom resource definition of both, generated: :mod:`.crd`;
- parsing of a run file or a cluster's object, with a list of precise errors: :mod:`.load`;
- messages between the processes of a run: :mod:`.wire`, :mod:`.endpoints`; the byte layout of published weights:
  :mod:`.weight_layout`, its files, :mod:`.weight_files`, and its process group, :mod:`.weight_group`;
- requests and responses of the curve-fit sidecar: :mod:`.forecast`;
- environment variables of a process: :mod:`.process`; paths of the run's files: :mod:`.paths`; the curve as a table:
  :mod:`.curve`; memory estimates: :mod:`.memory`;
- what a value of a choice implies: :mod:`.engines`, :mod:`.weight_backends`, :mod:`.lora`, :mod:`.source_kind`, :mod:`.built_in`
  (environments), :mod:`.recipe.loss`.

Not here: I/O beyond reading a spec file, one HTTP exchange (:mod:`.http_client`), the client of object stores
(:mod:`.object_store`) and the process group, torch, calls to Kubernetes, and decisions.
"""
