"""What produces rollouts: the vLLM server of a run, its plug-ins, and the actor that feeds it.

Lives here: the launcher of the server (:mod:`.vllm_server`, :mod:`.vllm_lifetime`), the weight-transfer engine
inside it (:mod:`.vllm_worker`), the one caller of its HTTP API (:mod:`.vllm_client`, :mod:`.vllm_replies`), and
the actor that takes leases, generates, grades and pushes. vLLM is pinned, and all that knows its internals is
in modules called ``vllm_*``.

Never lives here: which prompts to generate (the coordinator), what a correct answer is
(``scalerl_tasks``), or anything of training. Nothing here imports ``scalerl_trainer``.
"""
