"""New weights to the generators, while their generations in flight pause and go on.

What lives here
    ``buckets``    tensors into the buffers of :mod:`scalerl_api.weights`, with their checksum
    ``group``      the sender's side of a process group that stands alone
    ``control``    requests to actors, all at once, each with a deadline
    ``publisher``  the protocol: join, receive, retry with the rest, who holds the version at the end
    ``probe``      the measured mismatch between trainer and generator at one version

What never lives here: DeepSpeed and ranks (a publish takes a stream of full tensors, whoever gathers
them), the coordinator's bookkeeping, vLLM.

No call in here outlives its deadline. Threads that are stuck in gloo or in a request to a stuck peer
are daemons and are never joined; closing sockets under them is what ends them.
"""
