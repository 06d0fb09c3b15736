"""Publishes weights to the generators, whose generations in flight pause and resume.

    ``publisher``       the interface of both publishers, and what they measure
    ``published_weights``
                        what they publish: whole weights or adapters, filled into buckets
    ``make_publisher``  chooses the publisher by ``weightSync.backend``
    ``group_publisher`` over a process group: join, receive, retry with the members that the answers leave
    ``file_publisher``  through files in the place of a group
    ``weight_writer``   versions into files: bases and deltas; ``weight_folders`` of a volume or an object store
    ``sender_group``    the sender's side of a process group besides the default one
    ``actor_control``   concurrent requests to actors, each with a deadline
    ``probe``           the mismatch between trainer and generators at one version, and its sequences

No DeepSpeed or ranks (a publish reads a stream of whole tensors), coordinator state, or vLLM. Rank 0's publishes, which need ranks and the
coordinator, are in :mod:`scalerl_trainer.publishes`.

No call outlives its deadline. Threads that are stuck in gloo or in a request are daemons and never joined; they end when
their sockets are closed.
"""
