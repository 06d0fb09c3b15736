"""How the vLLM server starts and fails: what :mod:`scalerl_generator.vllm_server` and its workers share."""
