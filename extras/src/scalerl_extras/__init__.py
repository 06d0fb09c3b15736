"""What a run can do without, found by entry points (:mod:`scalerl_api.registry`); no other member imports this one.

task.plugin      ─▶ source.open_op_graph() ─▶ OpGraphSource      opgraph: word problems over graphs of operations
verifier.name    ─▶ verifier.blend(), .strict(), …               and verifiers of their steps
scalerl simulate ─▶ arguments.add_simulate()                     simulation: the work of a trace under another schedule
"""
