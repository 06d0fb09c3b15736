"""Weight updates: what the actor asks of the server, and how vLLM's workers receive and install a version, whole or adapters (LoRA).
The docstring of :mod:`scalerl_generator` has the steps."""
